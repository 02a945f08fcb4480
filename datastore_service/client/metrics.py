"""Client metrics, in prometheus-client's default registry: SGLang's /metrics shows them."""

from prometheus_client import Counter, Gauge, Histogram

BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

STEP_SECONDS = Histogram(
    "specstore_client_step_seconds", "Time that a decode step waited for its drafts", buckets=BUCKETS
)
FAILURES = Counter(
    "specstore_client_failures",
    "Steps without an answer of the service: it came after --specstore-deadline-ms (deadline), or there is no connection (unreachable)",
    ["reason"],
)
FALLBACK_DRAFTS = Counter(
    "specstore_client_fallback_drafts",
    "Draft trees that the engine drafted from its own sessions, for want of an answer",
)
DAMAGED_TREES = Counter(
    "specstore_client_damaged_trees",
    "Draft trees of a service that were dropped because they cannot be right: the service has a fault, or another process answers in its place",
    ["fault"],
)
RESYNCS = Counter("specstore_client_resyncs", "Sessions sent again to a service that had lost them")
RECONNECTS = Counter("specstore_client_connects", "Draft streams opened")
MOVES = Counter("specstore_client_moves", "Sessions sent to another service because theirs did not answer")
TAKEOVERS = Counter(
    "specstore_client_takeovers",
    "First steps of sessions that a prefill instance had begun: whether the service had the session (held, missing, unanswered)",
    ["session"],
)
# Several scheduler processes may share one /metrics: the gauge is 1 if any of them has an open breaker.
BREAKER_OPEN = Gauge(
    "specstore_client_breaker_open",
    "1 while the engine does not ask this service: it missed several deadlines in a row",
    ["endpoint"],
    multiprocess_mode="livemax",
)
