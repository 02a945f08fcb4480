"""Service metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from datastore_service.protocol.tree import Tier
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import Namespaces

BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2)


class ServiceMetrics:
    """The service's metrics for Prometheus.

    registry: the service's own, so that two services in one process do not collide."""

    def __init__(self, namespaces: Namespaces, limits: ServiceLimits) -> None:
        self.registry = CollectorRegistry()
        self.step_seconds = Histogram(
            "specstore_step_seconds",
            "Time to answer one Draft message: reading it, the engine, writing the reply",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.engine_seconds = Histogram(
            "specstore_engine_seconds",
            "The engine's part of that: waiting for the sessions, learning and drafting",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.refusals = Counter(
            "specstore_refusals", "Calls refused, by status code", ["code"], registry=self.registry
        )
        self.over_budget = Counter(
            "specstore_over_budget",
            "Entries that a limit on sessions, tokens or tenants refused, or whose output the disk or the live tier did not take",
            ["model"],
            registry=self.registry,
        )
        self._streams = Gauge("specstore_streams", "Draft streams open", registry=self.registry)
        self._export("specstore_stream_limit", "Most Draft streams", limits.streams)
        self._export("specstore_namespace_limit", "Most namespaces", limits.namespaces)
        self.registry.register(_NamespaceCollector(namespaces))
        ProcessCollector(registry=self.registry)

    def count_streams(self, streams: Callable[[], int]) -> None:
        """Exports the number of open Draft streams.

        streams: returns how many are open."""
        self._streams.set_function(streams)

    def _export(self, name: str, description: str, limit: int) -> None:
        Gauge(name, description, registry=self.registry).set(limit)


class _NamespaceCollector:
    """Reads the engines' counters when Prometheus scrapes."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces

    def collect(self) -> Iterator[Metric]:
        names = ["model", "tenant"]
        sessions = GaugeMetricFamily("specstore_sessions", "Open sessions", labels=names)
        session_limit = GaugeMetricFamily("specstore_session_limit", "Most open sessions", labels=names)
        conversations = GaugeMetricFamily(
            "specstore_conversations", "Texts kept for a conversation's next request", labels=names
        )
        drafts = CounterMetricFamily("specstore_drafts", "Draft trees asked for", labels=names)
        failures = CounterMetricFamily(
            "specstore_merge_failures", "Merges of the live tier that failed; no text is lost", labels=names
        )
        logs = GaugeMetricFamily(
            "specstore_log_bytes", "Bytes of write-ahead logs that are not sealed yet", labels=names
        )
        unsynced = GaugeMetricFamily(
            "specstore_log_unsynced_bytes", "Of those, bytes that a power failure would take", labels=names
        )
        log_failures = CounterMetricFamily(
            "specstore_log_failures",
            "Outputs that could not be logged and were not published, and logs that could not be synced",
            labels=names,
        )
        held = GaugeMetricFamily("specstore_bytes", "Bytes a tier holds", labels=[*names, "tier"])
        tokens = GaugeMetricFamily("specstore_tokens", "Tokens a tier holds", labels=[*names, "tier"])
        token_limit = GaugeMetricFamily(
            "specstore_token_limit", "Most tokens of a tier that has a limit", labels=[*names, "tier"]
        )
        segments = GaugeMetricFamily("specstore_segments", "Segments of a tier", labels=[*names, "tier"])
        damaged = GaugeMetricFamily(
            "specstore_damaged_segments",
            "Segments taken out because their files have changed",
            labels=[*names, "tier"],
        )
        hits = CounterMetricFamily(
            "specstore_hits", "Drafts with a token of the tier", labels=[*names, "tier"]
        )
        drafted = CounterMetricFamily(
            "specstore_drafted_tokens", "Tokens drafted, by source", labels=[*names, "tier"]
        )
        accepted = CounterMetricFamily(
            "specstore_accepted_tokens",
            "Drafted tokens that the session then went on with, by source; verified or not",
            labels=[*names, "tier"],
        )
        for hosted in self._namespaces:
            stats, labels = hosted.engine.stats(), [hosted.namespace.model, hosted.namespace.tenant]
            limits = hosted.engine.limits
            session_limit.add_metric(labels, limits.sessions)
            token_limit.add_metric([*labels, Tier.SESSION.name.lower()], limits.tokens)
            token_limit.add_metric([*labels, Tier.LIVE.name.lower()], limits.live_tokens)
            sessions.add_metric(labels, stats.sessions)
            conversations.add_metric(labels, stats.conversations)
            drafts.add_metric(labels, stats.drafts)
            failures.add_metric(labels, stats.merge_failures)
            logs.add_metric(labels, stats.log_bytes)
            unsynced.add_metric(labels, stats.log_unsynced_bytes)
            log_failures.add_metric(labels, stats.log_failures)
            for tier, of_tier in stats.tiers.items():
                of = [*labels, tier.name.lower()]
                held.add_metric(of, of_tier.nbytes)
                tokens.add_metric(of, of_tier.tokens)
                segments.add_metric(of, of_tier.segments)
                damaged.add_metric(of, of_tier.damaged)
                hits.add_metric(of, of_tier.hits)
                drafted.add_metric(of, of_tier.drafted)
                accepted.add_metric(of, of_tier.accepted)
        yield from (sessions, conversations, drafts, failures, logs, unsynced, log_failures)
        yield from (held, tokens, segments, damaged, hits, drafted, accepted, session_limit, token_limit)
