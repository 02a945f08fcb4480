"""The registry of Prometheus as OTLP has it, reading by reading, and the thread that sends it."""

import logging
import threading
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from datastore_service.server import metric_points, metrics_export
from datastore_service.server.metric_points import Readings
from datastore_service.server.metrics_export import MetricsExport, export_metrics

FAR = 86_400.0  # seconds: the interval of a test that waits for none


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def readings(registry, monkeypatch):
    """Made at 100; the first reading is at 101."""
    clock = iter(range(100, 1000))
    monkeypatch.setattr(metric_points, "time", SimpleNamespace(time_ns=lambda: next(clock)))
    return Readings(registry, Resource({"service.name": "mine"}))


def metrics(messages) -> dict:
    """By name; of several messages the last one's."""
    return {
        metric.name: metric
        for message in messages
        for of in message.resource_metrics
        for scope in of.scope_metrics
        for metric in scope.metrics
    }


def since(readings) -> dict[str, int]:
    """By label, when each series of the counter `c` begins."""
    points = metrics(readings.read())["c_total"].data.data_points
    return {point.attributes["of"]: point.start_time_unix_nano for point in points}


def test_a_counter_is_a_monotonic_cumulative_sum(registry, readings):
    Counter("c", "What it counts", ["of"], registry=registry).labels("a").inc(3)
    counter = metrics(readings.read())["c_total"]
    (point,) = counter.data.data_points
    assert counter.description == "What it counts"
    assert counter.data.is_monotonic
    assert counter.data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    assert (point.value, point.attributes) == (3, {"of": "a"})
    assert (point.start_time_unix_nano, point.time_unix_nano) == (100, 101)


def test_a_series_that_is_new_or_fell_begins_at_the_reading_before(registry, readings):
    counter = Counter("c", "c", ["of"], registry=registry)
    counter.labels("a").inc(3)
    assert since(readings) == {"a": 100}
    counter.labels("b").inc()
    assert since(readings) == {"a": 100, "b": 101}
    counter.remove("a")
    counter.labels("a").inc(2)
    assert since(readings) == {"a": 102, "b": 101}
    counter.remove("b")
    assert since(readings) == {"a": 102}
    counter.labels("b").inc(9)
    assert since(readings) == {"a": 102, "b": 104}


def test_a_reading_that_failed_is_none(registry, readings):
    counter = Counter("c", "c", ["of"], registry=registry)
    counter.labels("a").inc()
    assert since(readings) == {"a": 100}
    broken = Summary("s", "s", registry=registry)
    counter.labels("b").inc()
    with pytest.raises(ValueError, match="s: a summary is not exported"):
        readings.read()
    registry.unregister(broken)
    assert since(readings) == {"a": 100, "b": 101}


def test_a_histogram_has_the_count_of_each_bucket(registry, readings):
    histogram = Histogram("h", "h", ["of"], buckets=(1, 2, 5), registry=registry)
    for value in (0.5, 1, 1.5, 3, 9, 10):
        histogram.labels("a").observe(value)
    histogram.labels("b").observe(2)
    data = metrics(readings.read())["h"].data
    assert data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    a, b = data.data_points
    assert (a.attributes, a.explicit_bounds, a.bucket_counts) == ({"of": "a"}, [1, 2, 5], [2, 1, 1, 2])
    assert (a.count, a.sum, a.start_time_unix_nano) == (6, 25, 100)
    assert (b.attributes, b.bucket_counts, b.count, b.sum) == ({"of": "b"}, [0, 1, 0, 0], 1, 2)


def test_a_gauge_is_a_gauge_and_a_family_without_series_is_left_out(registry, readings):
    Gauge("g", "g", registry=registry).set(-1.5)
    Gauge("none", "none", ["of"], registry=registry)
    of_name = metrics(readings.read())
    assert [point.value for point in of_name["g"].data.data_points] == [-1.5]
    assert list(of_name) == ["g"]


def test_many_series_are_several_messages(registry, readings, monkeypatch):
    monkeypatch.setattr(metric_points, "POINTS", 4)
    for name in ("a", "b"):
        gauge = Gauge(name, name, ["of"], registry=registry)
        for i in range(5):
            gauge.labels(str(i)).set(i)
    messages = readings.read()
    sizes = [{name: len(of.data.data_points) for name, of in metrics([each]).items()} for each in messages]
    assert sizes == [{"a": 4}, {"a": 1, "b": 3}, {"b": 2}]


class Kept(MetricExporter):
    """Keeps what it is given. blocks: until it is shut down."""

    def __init__(self, blocks: bool = False) -> None:
        super().__init__()
        self.given, self._blocks, self._ended = [], blocks, threading.Event()

    def export(self, metrics_data, timeout_millis=10_000, **_):
        self.given.append(metrics_data)
        assert not self._blocks or self._ended.wait(60)
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=10_000):
        return True

    def shutdown(self, timeout_millis=30_000, **_):
        self._ended.set()


def test_the_end_exports_once():
    exporter = Kept()
    MetricsExport(lambda: ["last"], exporter, FAR).stop()
    assert exporter.given == ["last"]


def test_an_export_that_does_not_end_holds_up_no_end(caplog):
    export = MetricsExport(lambda: ["last"], Kept(blocks=True), FAR)
    export.stop(0.01)
    assert "the last metrics were not sent" in caplog.text
    export._thread.join(60)
    assert not export._thread.is_alive()


def test_a_reading_that_fails_is_logged_and_the_next_is_sent(caplog):
    exporter, sent, readings = Kept(), threading.Event(), iter([ValueError("broken"), ["next"]])

    def read():
        reading = next(readings, ["last"])
        if isinstance(reading, ValueError):
            raise reading
        sent.set()
        return reading

    export = MetricsExport(read, exporter, 0.001)
    assert sent.wait(60)
    export.stop()
    assert exporter.given[0] == "next"
    assert "metrics were not exported" in caplog.text and "broken" in caplog.text


class TestEnvironment:
    @pytest.fixture
    def exports(self, monkeypatch):
        """What was started: the seconds between two exports."""
        made = []

        class Started:
            def __init__(self, read, exporter, seconds):
                exporter.shutdown()
                made.append(seconds)

            def stop(self):
                """The process's end would call it."""

        monkeypatch.setattr(metrics_export, "MetricsExport", Started)
        monkeypatch.setattr(metrics_export, "atexit", SimpleNamespace(register=lambda stop: None))
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
        return made

    @pytest.mark.parametrize(("given", "seconds"), [("", 60), ("1", 0.001), ("86400000", 86400)])
    def test_the_interval_is_in_milliseconds(self, exports, registry, given, seconds, monkeypatch):
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", given)
        export_metrics(registry)
        assert exports == [seconds]

    @pytest.mark.parametrize("given", ["0", "-1", "soon", "86400001", "inf"])
    def test_a_bad_interval_is_a_warning(self, exports, registry, given, monkeypatch, caplog):
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", given)
        export_metrics(registry)
        said = f"no metrics: OTEL_METRIC_EXPORT_INTERVAL is {given!r}, not a number of milliseconds"
        assert not exports and said in caplog.text

    def test_a_form_that_is_not_to_be_had_is_a_warning(self, exports, registry, monkeypatch, caplog):
        name = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
        monkeypatch.setenv(name, "DELTA")
        with caplog.at_level(logging.WARNING):
            export_metrics(registry)
        assert exports and f"{name} is 'DELTA': metrics are exported as cumulative" in caplog.text
