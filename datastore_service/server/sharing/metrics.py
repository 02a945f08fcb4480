"""What sharing counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class ShareMetrics:
    """The metrics of a service with `--share`. registry: the service's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connected = Gauge(
            "specstore_share_connected",
            "1 while the server of --share answers; at 0 the service goes on alone",
            registry=registry,
        )
        self.unsent = Gauge(
            "specstore_share_unsent",
            "Outputs in the live tier that the others were not told of yet",
            ["model", "tenant"],
            registry=registry,
        )
        self.sent = Counter(
            "specstore_share_sent",
            "Outputs that the others were told of",
            ["model", "tenant"],
            registry=registry,
        )
        self.dropped = Counter(
            "specstore_share_dropped",
            "Outputs that left the live tier, by its limits, a flush or a forget, before the others were told of them",
            ["model", "tenant"],
            registry=registry,
        )
        self.taken = Counter(
            "specstore_share_taken",
            "Outputs of others that were read; one that is held already counts and is not added",
            ["model", "tenant"],
            registry=registry,
        )
        self.refused = Counter(
            "specstore_share_refused",
            "Messages of others that were not taken, by why: unknown, malformed, tokens, subjects and vocabulary should stay 0, room is "
            "the tenant's quota",
            ["model", "tenant", "reason"],
            registry=registry,
        )
        self.failures = Counter(
            "specstore_share_failures",
            "Exchanges of a namespace that failed though the server answers: it refused a command, or this service's disk did",
            ["model", "tenant"],
            registry=registry,
        )
        self.missed = Counter(
            "specstore_share_missed",
            "Times that messages had left a stream, or the server had lost messages, before this service had read them: repeat each forget since "
            "then here",
            ["model", "tenant"],
            registry=registry,
        )
        self.forgets_unsent = Gauge(
            "specstore_share_forgets_unsent",
            "Forgets that the others were not told of yet",
            registry=registry,
        )
