"""A real service sends the metrics of its page to a collector that the environment names."""

import signal
from contextlib import ExitStack

import numpy as np
import pytest
import requests
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric
from prometheus_client.parser import text_string_to_metric_families

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from sglang_patches.launch.processes import PROXIES, free_port
from tests.integration.datastore.conftest import specstore
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.otlp import collecting
from tests.waiting import eventually

# Of the process, which goes on living between a look at the page and the next message.
MOVING = {
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
}
Values = dict[tuple[str, str, frozenset], float | None]  # by type, sample and labels; None of what moves


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the messages that it is sent."""

    def __init__(self) -> None:
        self.messages: list[pb.ExportMetricsServiceRequest] = []

    def Export(self, request, context):  # noqa: N802
        self.messages.append(request)
        return pb.ExportMetricsServiceResponse()

    def newest(self) -> list[Metric]:
        (of,) = self.messages[-1].resource_metrics
        (scope,) = of.scope_metrics
        return list(scope.metrics)


@pytest.fixture
def collector():
    with collecting(Collector(), metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server) as collector:
        yield collector


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Starts one, in an environment that has these variables too."""
    with ExitStack() as ends:

        def start(*flags: object, **variables: object) -> DatastoreService:
            with monkeypatch.context() as context:
                for name, value in variables.items():
                    context.setenv(name, str(value))
                return ends.enter_context(DatastoreService(tmp_path / "log", *flags))

        yield start


def draft(service: DatastoreService, tenant: str = "") -> None:
    """Asks for one draft and publishes one output."""
    client = GrpcDatastore(service.endpoint, Namespace("m", "ab" * 32, tenant))
    assert client.wait_connected(60)
    tokens = np.arange(64, dtype=np.int32)
    client.step([Entry("s", tokens=tokens, budget=Budget(8, 8, 1), opening=Opening(), closing=True)], 60)
    client.close()


def of_page(url: str) -> Values:
    text = requests.get(url, proxies=PROXIES, timeout=60).text
    return {
        (family.type, sample.name, frozenset(sample.labels.items())): None if sample.name in MOVING else sample.value
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")  # when a counter was made: OTLP has it in each point
        for sample in family.samples
    }  # fmt: skip


def of_messages(metrics: list[Metric]) -> Values:
    """As the page would have them."""
    values: Values = {}
    for metric in metrics:
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = frozenset((each.key, each.value.string_value) for each in point.attributes)
            if kind == "histogram":
                values |= _buckets(metric.name, labels, point)
            else:
                value = None if metric.name in MOVING else point.as_double
                values[{"sum": "counter"}.get(kind, kind), metric.name, labels] = value
    return values


def _buckets(name: str, labels: frozenset, point) -> Values:
    bounds = [*map(str, point.explicit_bounds), "+Inf"]
    up_to = np.cumsum(point.bucket_counts).tolist()
    return {
        ("histogram", f"{name}_count", labels): point.count,
        ("histogram", f"{name}_sum", labels): point.sum,
    } | {
        ("histogram", f"{name}_bucket", labels | {("le", bound)}): count
        for bound, count in zip(bounds, up_to, strict=True)
    }


def test_the_collector_has_what_the_page_has(collector, service):
    """After drafts of two tenants, one of them with a quota, and a refusal."""
    port = free_port()
    running = service(
        "--metrics-port", port, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_METRIC_EXPORT_INTERVAL=50
    )
    draft(running)
    draft(running, "acme")
    asked = ("--endpoint", running.endpoint)
    assert specstore("quota", "set", "--tenant", "acme", "--sessions", "7", *asked).returncode == 0
    assert specstore("flush", "--model", "none", "--tokenizer", "ab" * 32, "--all", *asked).returncode == 1
    page = f"http://127.0.0.1:{port}/metrics"
    eventually(lambda: bool(collector.messages) and of_messages(collector.newest()) == of_page(page))
    names = {name for _, name, _ in of_page(page)}
    assert {"specstore_drafts_total", "specstore_quota", "specstore_refusals_total"} < names
    assert "specstore_step_seconds_bucket" in names and names > MOVING


def test_what_is_counted_has_a_start_and_its_temporality(collector, service):
    running = service(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=collector.endpoint, OTEL_METRIC_EXPORT_INTERVAL=50)
    eventually(lambda: bool(collector.messages))
    draft(running)
    eventually(lambda: "specstore_drafts_total" in {metric.name for metric in collector.newest()})
    counted = {metric.name: metric for metric in collector.newest() if not metric.HasField("gauge")}
    for metric in counted.values():
        data = getattr(metric, metric.WhichOneof("data"))
        assert data.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
        assert metric.HasField("histogram") or data.is_monotonic
        assert all(0 < point.start_time_unix_nano < point.time_unix_nano for point in data.data_points)
    (whole,) = counted["specstore_step_seconds"].histogram.data_points
    (later,) = counted["specstore_drafts_total"].sum.data_points
    assert whole.start_time_unix_nano < later.start_time_unix_nano
    (of,) = collector.messages[-1].resource_metrics
    named = {each.key: each.value.string_value for each in of.resource.attributes}
    assert named["service.name"] == "specstore" and named["service.instance.id"]


def test_the_last_values_are_sent_before_the_service_ends(collector, service):
    running = service(OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_METRIC_EXPORT_INTERVAL=86_400_000)
    draft(running)
    assert not collector.messages
    running.signal(signal.SIGTERM)
    assert running.wait(60) == 0
    assert len(collector.messages) == 1
    (drafts,) = [metric for metric in collector.newest() if metric.name == "specstore_drafts_total"]
    assert [point.as_double for point in drafts.sum.data_points] == [1]


def test_a_collector_that_is_away_is_logged_and_harms_nothing(service):
    endpoint = f"http://127.0.0.1:{free_port()}"
    running = service(
        OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_METRIC_EXPORT_INTERVAL=50, OTEL_EXPORTER_OTLP_TIMEOUT=1
    )
    eventually(lambda: "Failed to export metrics" in running.logs())
    draft(running)
    running.signal(signal.SIGTERM)
    assert running.wait(60) == 0
