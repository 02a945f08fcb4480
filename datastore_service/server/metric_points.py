"""Reads the registry of Prometheus as OTLP's data model has it. It needs the packages of `specstore[otel]`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby, pairwise
from math import inf
from typing import TypeAlias

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    DataT,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family

POINTS = 5000  # of one message; a collector takes 4 MB by gRPC unless it is told otherwise
CUMULATIVE = AggregationTemporality.CUMULATIVE
Point: TypeAlias = NumberDataPoint | HistogramDataPoint


class Readings:
    """Reads a registry again and again, and knows since when each series counts.

    A series that the last reading has not, or has with more, began after it; those of the first began when this was made."""

    def __init__(self, registry: CollectorRegistry, resource: Resource) -> None:
        self._registry, self._resource = registry, resource
        self._scope = InstrumentationScope("specstore", version("specstore"))
        self._now = self._last = time.time_ns()  # when the registry is read, and when it was before
        self._read: dict[tuple, tuple[float, int]] = {}  # of each series its value, and since when it counts
        self._known = self._read  # the same of the reading before

    def read(self) -> list[MetricsData]:
        """What the registry says now, in messages of at most POINTS points. Raises what a collector of the registry raises."""
        self._now, self._read = time.time_ns(), {}
        points = [(family, point) for family in self._registry.collect() for point in self._points(family)]
        self._last, self._known = self._now, self._read
        return [self._message(points[first : first + POINTS]) for first in range(0, len(points), POINTS)]

    def _message(self, points: Sequence[tuple[Family, Point]]) -> MetricsData:
        families = groupby(points, lambda each: each[0].name)
        metrics = [_metric([*of]) for _, of in families]
        scope = ScopeMetrics(self._scope, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], self._resource.schema_url)])

    def _points(self, family: Family) -> Iterator[Point]:
        if family.type == "histogram":
            yield from self._histograms(family)
        elif family.type == "counter":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    since = self._since(family, sample.labels, sample.value)
                    yield NumberDataPoint(sample.labels, since, self._now, float(sample.value))
        elif family.type == "gauge":
            for sample in family.samples:
                yield NumberDataPoint(sample.labels, self._now, self._now, float(sample.value))
        else:
            raise ValueError(f"{family.name}: a {family.type} is not exported")

    def _histograms(self, family: Family) -> Iterator[HistogramDataPoint]:
        buckets: dict[tuple, dict[float, float]] = defaultdict(dict)
        sums: dict[tuple, float] = {}
        for sample in family.samples:
            labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
            if sample.name.endswith("_bucket"):
                buckets[labels][float(sample.labels["le"])] = sample.value
            elif sample.name.endswith("_sum"):
                sums[labels] = sample.value
        for labels, up_to in buckets.items():
            count = int(up_to[inf])
            yield HistogramDataPoint(
                dict(labels),
                self._since(family, dict(labels), count),
                self._now,
                count=count,
                sum=sums[labels],
                bucket_counts=[int(upper - lower) for lower, upper in pairwise([0.0, *up_to.values()])],
                explicit_bounds=list(up_to)[:-1],
                min=None,  # type: ignore[arg-type]  # optional in OTLP; Prometheus has neither
                max=None,  # type: ignore[arg-type]
            )

    def _since(self, family: Family, labels: Mapping[str, str], value: float) -> int:
        series = family.name, *sorted(labels.items())
        before, since = self._known.get(series, (inf, 0))
        if value < before:
            since = self._last
        self._read[series] = value, since
        return since


def _metric(points: Sequence[tuple[Family, Point]]) -> Metric:
    """The points of one family, which keeps the name that Prometheus has it by."""
    family, values = points[0][0], [point for _, point in points]
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Metric(name, family.documentation, "", _DATA[family.type](values))


_DATA: dict[str, Callable[[list], DataT]] = {
    "counter": lambda points: Sum(points, CUMULATIVE, is_monotonic=True),
    "histogram": lambda points: Histogram(points, CUMULATIVE),
    "gauge": Gauge,
}
