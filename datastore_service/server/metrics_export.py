"""Exports the service's metrics to an OTLP collector if OpenTelemetry's own environment variables name one.

They are those of Prometheus: their registry is read at each interval, so that nothing is measured twice."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from datastore_service.server.otlp import start_export

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData
    from opentelemetry.sdk.resources import Resource

log = logging.getLogger(__name__)

END_SECONDS = 5.0  # for the last export
DAY = 86_400_000  # milliseconds
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
# What Prometheus counts cannot be had otherwise: these are not choices here.
FIXED = {
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "cumulative",
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": "explicit_bucket_histogram",
}


class MetricsExport:
    """Exports on a thread from the construction until `stop`.

    read: returns what is to be sent. seconds: between two exports."""

    def __init__(
        self, read: Callable[[], Iterable[MetricsData]], exporter: MetricExporter, seconds: float
    ) -> None:
        self._read, self._exporter, self._seconds = read, exporter, seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specstore-metrics", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = END_SECONDS) -> None:
        """Exports once more, and gives that up after so many seconds. To be called once."""
        self._stopping.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("the last metrics were not sent", extra={"seconds": seconds})
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            for message in self._read():
                self._exporter.export(message)  # which logs what the collector does not take
        except Exception:  # the next export is due all the same
            log.exception("metrics were not exported")


def export_metrics(registry: CollectorRegistry) -> None:
    """Starts the export if the environment asks for it; the process's end sends the last values."""
    start_export("metrics", "metric_exporter:OTLPMetricExporter", partial(_start, registry))


def _start(registry: CollectorRegistry, exporter: MetricExporter, resource: Resource) -> None:
    from datastore_service.server.metric_points import Readings

    for name, value in FIXED.items():
        if (given := os.environ.get(name) or value).lower() != value:
            log.warning("%s is %r: metrics are exported as %s", name, given, value)
    export = MetricsExport(Readings(registry, resource).read, exporter, _seconds())
    atexit.register(export.stop)


def _seconds() -> float:
    """The interval. Raises ValueError."""
    given = os.environ.get(INTERVAL) or "60000"
    if not (given.isdecimal() and 0 < int(given) <= DAY):
        raise ValueError(f"{INTERVAL} is {given!r}, not a number of milliseconds from 1 to {DAY}")
    return int(given) / 1000
