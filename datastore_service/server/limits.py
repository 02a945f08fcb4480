"""Limits of the service. A message that exceeds one is refused, and the refusal names the field."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datastore_service.engine.checking import MAX_QUERIES, MAX_QUERY_TOKENS
from datastore_service.engine.limits import Limits
from datastore_service.protocol.names import MAX_NAME_BYTES
from datastore_service.protocol.types import MAX_DEPTH, MAX_NODES

PROCESS_BYTES = 512 << 20  # of a service without text, with the one merge that it runs at a time


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The engine has limits of its own, on sessions and tokens; an entry that exceeds one gets a status that says so.

    grace: seconds after which the sessions of a broken stream are closed, unless another stream holds them.
    snapshot_seconds: that a snapshot is kept at most.
    """

    message_bytes: int = 64 << 20
    entries: int = 1024  # a message
    documents: int = 65536  # a Warmup message
    rejected: int = 256  # an entry
    queries: int = MAX_QUERIES  # a message
    query_tokens: int = MAX_QUERY_TOKENS
    nodes: int = MAX_NODES
    depth: int = MAX_DEPTH
    children: int = MAX_NODES
    name_bytes: int = MAX_NAME_BYTES  # session, conversation, and each part of a namespace
    namespaces: int = 256
    quotas: int = 4096  # tenants that have one
    streams: int = 64
    subjects: int = 1024  # a Forget message
    grace: float = 60.0
    snapshot_seconds: float = math.inf

    def most_bytes(self, of_namespace: Limits) -> int:
        """The memory that the service may take with these limits of each namespace, without the page cache."""
        return PROCESS_BYTES + self.namespaces * of_namespace.most_bytes
