"""Which signals the environment has exported, by which protocol, in whose name, and what is said of what cannot be met."""

import sys

import pytest

from datastore_service.server import otlp
from datastore_service.server.otlp import start_export

SIGNALS = {"traces": "trace_exporter:OTLPSpanExporter", "metrics": "metric_exporter:OTLPMetricExporter"}
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("ENDPOINT", "PROTOCOL"):
        for of in ("", "TRACES_", "METRICS_"):
            monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{of}{name}", raising=False)
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def started(monkeypatch):
    """Sets an environment and returns what it starts: by signal the exporter and the resource."""
    made: list = []

    def start(variables: dict[str, str]) -> dict:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        by_signal = {}
        for signal, exporter in SIGNALS.items():
            start_export(signal, exporter, lambda *given, of=signal: by_signal.__setitem__(of, given))
        made.extend(exporter for exporter, _ in by_signal.values())
        return by_signal

    yield start
    for exporter in made:
        exporter.shutdown()


def warnings(caplog) -> list[str]:
    """Of the export alone: a thread of another test may warn too."""
    return [record.message for record in caplog.records if record.name == otlp.__name__]


@pytest.mark.parametrize(
    ("variables", "signals"),
    [
        ({}, set()),
        (ENDPOINT, {"traces", "metrics"}),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"}, {"metrics"}),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, {"traces"}),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, {"metrics"}),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}, {"traces"}),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, {"metrics"}),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, set()),
    ],
)
def test_the_environment_switches_each_signal_on(started, variables, signals, caplog):
    assert started(variables).keys() == signals
    assert not warnings(caplog)


def test_a_signal_has_its_own_protocol(started):
    exporters = started(ENDPOINT | {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"})
    protocols = {
        signal: type(exporter).__module__.split(".")[-2] for signal, (exporter, _) in exporters.items()
    }
    assert protocols == {"traces": "grpc", "metrics": "http"}


def test_the_environment_names_the_service(started):
    def names() -> list[str]:
        return [resource.attributes["service.name"] for _, resource in started(ENDPOINT).values()]

    assert names() == ["specstore"] * 2
    started({"OTEL_SERVICE_NAME": "mine"})
    assert names() == ["mine"] * 2


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_%s_EXPORTER": "zipkin"}, "OTEL_%s_EXPORTER is 'zipkin', not otlp or none"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "'http/json', not one of grpc, http/protobuf"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "'soon'"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_is_a_warning(started, signal, variables, said, caplog):
    assert not started({name.replace("%s", signal.upper()): value for name, value in variables.items()})
    (warning,) = [each for each in warnings(caplog) if each.startswith(f"no {signal}: ")]
    assert said.replace("%s", signal.upper()) in warning


def test_without_the_sdk_it_says_what_to_install(started, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert not started(ENDPOINT)
    assert len(warnings(caplog)) == 2
    assert all("pip install 'specstore[otel]'" in warning for warning in warnings(caplog))
