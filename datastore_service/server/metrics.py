"""Service metrics for Prometheus. docs/metrics.md is written from their descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from datastore_service.engine.limits import Limits
from datastore_service.engine.stats import EngineStats, TierStats
from datastore_service.protocol.tree import Tier
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import Namespaces
from datastore_service.server.quotas import Quotas
from datastore_service.server.reloading import Reloading

BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2)
NAMESPACE_LABELS = ["model", "tenant"]
TIER_LABELS = [*NAMESPACE_LABELS, "tier"]
QUOTA_LABELS = ["tenant", "quota"]


class OfNamespace(NamedTuple):
    """What a namespace's engine says when Prometheus scrapes."""

    stats: EngineStats
    limits: Limits


class OfTier(NamedTuple):
    """What a namespace's engine says of one tier."""

    tier: Tier
    held: TierStats
    limits: Limits

    @property
    def token_limit(self) -> int | None:
        return {Tier.SESSION: self.limits.tokens, Tier.LIVE: self.limits.live_tokens}.get(self.tier)


class OfQuota(NamedTuple):
    """What a tenant's quota says of one of its parts. used: None of a rate."""

    limit: int
    used: int | None
    refused: int


Said = TypeVar("Said")


class Figure(NamedTuple, Generic[Said]):
    """A metric of each namespace, of each tier of each namespace, or of each part of each tenant's quota.

    read: its value, None if this one has none."""

    family: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    meaning: str
    read: Callable[[Said], float | None]


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
OF_NAMESPACES: tuple[Figure[OfNamespace], ...] = (
    Figure(GAUGE, "specstore_sessions", "Open sessions", lambda of: of.stats.sessions),
    Figure(
        GAUGE, "specstore_session_limit", "Most open sessions (--sessions)", lambda of: of.limits.sessions
    ),
    Figure(
        GAUGE,
        "specstore_conversations",
        "Conversations kept for their next request",
        lambda of: of.stats.conversations,
    ),
    Figure(
        COUNTER, "specstore_drafts", "Draft trees asked for, empty ones included", lambda of: of.stats.drafts
    ),
    Figure(
        COUNTER,
        "specstore_merge_failures",
        "Merges of the live tier that failed; should stay 0. No text is lost, but it stays in more and smaller segments than it should",
        lambda of: of.stats.merge_failures,
    ),
    Figure(
        GAUGE,
        "specstore_log_bytes",
        "Bytes of logs whose text is not yet in segments; at most a few hundred KB while merges succeed",
        lambda of: of.stats.log_bytes,
    ),
    Figure(
        GAUGE,
        "specstore_log_unsynced_bytes",
        "The part of specstore_log_bytes that a power failure would take",
        lambda of: of.stats.log_unsynced_bytes,
    ),
    Figure(
        COUNTER,
        "specstore_log_failures",
        "Outputs that could not be logged and were not published, and logs that could not be synced; should stay 0",
        lambda of: of.stats.log_failures,
    ),
    Figure(
        COUNTER,
        "specstore_unknown_priors",
        "Names of priors that sessions gave and that their tenant may not read, or that there are not: they were served without",
        lambda of: of.stats.unknown_priors,
    ),
    Figure(GAUGE, "specstore_workspaces", "Workspaces with text", lambda of: of.stats.workspaces),
    Figure(
        GAUGE,
        "specstore_workspace_tokens",
        "Tokens that workspaces hold",
        lambda of: of.stats.workspace_tokens,
    ),
    Figure(
        GAUGE,
        "specstore_workspace_token_limit",
        "Most tokens of all workspaces (--workspace-tokens)",
        lambda of: of.limits.workspace_tokens,
    ),
    Figure(
        GAUGE, "specstore_workspace_bytes", "Bytes that workspaces hold", lambda of: of.stats.workspace_bytes
    ),
    Figure(
        GAUGE,
        "specstore_groups",
        "Groups whose open sessions draft for each other",
        lambda of: of.stats.groups,
    ),
    Figure(GAUGE, "specstore_group_bytes", "Bytes that groups hold", lambda of: of.stats.group_bytes),
    Figure(
        GAUGE,
        "specstore_epoch",
        "Updates of the model's weights, by the worker that has heard of most",
        lambda of: of.stats.epoch,
    ),
)
OF_TIERS: tuple[Figure[OfTier], ...] = (
    Figure(GAUGE, "specstore_bytes", "Bytes that a tier holds", lambda of: of.held.nbytes),
    Figure(GAUGE, "specstore_tokens", "Tokens that a tier holds", lambda of: of.held.tokens),
    Figure(
        GAUGE,
        "specstore_token_limit",
        "Most tokens of the session tier (--tokens) and of the live tier (--live-tokens)",
        lambda of: of.token_limit,
    ),
    Figure(GAUGE, "specstore_segments", "Segments of a tier", lambda of: of.held.segments),
    Figure(
        GAUGE,
        "specstore_damaged_segments",
        "Segments of a tier that were taken out because their files have changed; should stay 0",
        lambda of: of.held.damaged,
    ),
    Figure(COUNTER, "specstore_hits", "Drafts with at least one token of the tier", lambda of: of.held.hits),
    Figure(COUNTER, "specstore_drafted_tokens", "Tokens drafted from the tier", lambda of: of.held.drafted),
    Figure(
        COUNTER,
        "specstore_accepted_tokens",
        "Tokens drafted from the tier with which the session then continued, whether or not the worker had verified them",
        lambda of: of.held.accepted,
    ),
)
OF_QUOTAS: tuple[Figure[OfQuota], ...] = (
    Figure(
        GAUGE,
        "specstore_quota",
        "A part of a tenant's quota (`specstore quota set`): live_bytes, sessions, streams, outputs_per_second or "
        "messages_per_second",
        lambda of: of.limit,
    ),
    Figure(
        GAUGE,
        "specstore_quota_used",
        "What the tenant has of it in all its namespaces; not of what is counted by the second",
        lambda of: of.used,
    ),
    Figure(
        COUNTER,
        "specstore_quota_refusals",
        "Sessions, streams, outputs and parts of warm-ups that it refused, and messages that it made wait",
        lambda of: of.refused,
    ),
)


class ServiceMetrics:
    """The service's metrics for Prometheus.

    registry: the service's own, so that two services in one process do not collide."""

    def __init__(self, namespaces: Namespaces, limits: ServiceLimits) -> None:
        self.registry = CollectorRegistry()
        self.step_seconds = Histogram(
            "specstore_step_seconds",
            "Time to answer one message of a worker: reading it, the engine, writing the reply",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.engine_seconds = Histogram(
            "specstore_engine_seconds",
            "The engine's part of specstore_step_seconds: waiting for the sessions, learning and drafting",
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.refusals = Counter(
            "specstore_refusals", "Calls refused, by gRPC status code", ["code"], registry=self.registry
        )
        self.over_budget = Counter(
            "specstore_over_budget",
            "Entries of messages for which there was no room: a limit or a quota on sessions, tokens or tenants, or an output that the "
            "disk, the live tier or a quota did not take",
            ["model"],
            registry=self.registry,
        )
        self._streams = Gauge(
            "specstore_streams", "Workers that are connected (open Draft streams)", registry=self.registry
        )
        Gauge("specstore_stream_limit", "Most connected workers (--streams)", registry=self.registry).set(
            limits.streams
        )
        Gauge("specstore_namespace_limit", "Most namespaces (--namespaces)", registry=self.registry).set(
            limits.namespaces
        )
        self._files_refused = Gauge(
            "specstore_files_refused",
            "Options whose changed files (TLS, table of identities) cannot be used, so that what they held before is in force; should "
            "stay 0, and the log says why",
            registry=self.registry,
        )
        self.registry.register(_NamespaceCollector(namespaces))
        ProcessCollector(registry=self.registry)

    def count_streams(self, streams: Callable[[], int]) -> None:
        """Exports the number of open Draft streams.

        streams: returns how many are open."""
        self._streams.set_function(streams)

    def count_refused_files(self, reloading: Sequence[Reloading]) -> None:
        """Exports how many values were not made anew because their changed files cannot be used."""
        self._files_refused.set_function(lambda: sum(bool(each.refused) for each in reloading))


class _NamespaceCollector:
    """Reads the engines' counters when Prometheus scrapes."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces

    def collect(self) -> Iterator[Metric]:
        engines = [
            (
                [hosted.namespace.model, hosted.namespace.tenant],
                OfNamespace(hosted.engine.stats(), hosted.engine.limits),
            )
            for hosted in self._namespaces
        ]
        tiers = [
            ([*labels, tier.name.lower()], OfTier(tier, held, of.limits))
            for labels, of in engines
            for tier, held in of.stats.tiers.items()
        ]
        yield from _families(OF_NAMESPACES, NAMESPACE_LABELS, engines)
        yield from _families(OF_TIERS, TIER_LABELS, tiers)
        yield from _families(OF_QUOTAS, QUOTA_LABELS, list(_parts_of(self._namespaces.quotas)))


def _parts_of(quotas: Quotas) -> Iterator[tuple[list[str], OfQuota]]:
    """Those that bound something, with their labels."""
    for use in quotas.bounded:
        used = use.used()
        for part, limit in use.quota.bounds().items():
            yield [use.tenant, part], OfQuota(limit, used.get(part), use.refused[part])


def _families(
    figures: Sequence[Figure[Said]], names: Sequence[str], said: Sequence[tuple[list[str], Said]]
) -> Iterator[Metric]:
    for figure in figures:
        family = figure.family(figure.name, figure.meaning, labels=names)
        for labels, of in said:
            value = figure.read(of)
            if value is not None:
                family.add_metric(labels, value)
        yield family
