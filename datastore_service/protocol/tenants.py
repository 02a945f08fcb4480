"""A message with entries of several tenants: each tenant has an engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from datastore_service.protocol.tree import EMPTY_TREE
from datastore_service.protocol.types import Entry, Reply, Status

Step = Callable[[Sequence[Entry]], list[Reply]]


def step_by_tenant(entries: Sequence[Entry], step_of: Callable[[str], Step | None]) -> list[Reply]:
    """One Reply for each Entry, in the same order. step_of: the engine of a tenant, None if there is no room for it."""
    rows: dict[str, list[int]] = {}
    for row, entry in enumerate(entries):
        rows.setdefault(entry.tenant, []).append(row)
    replies: list[Reply] = [Reply(Status.OVER_BUDGET, 0, EMPTY_TREE)] * len(entries)
    for tenant, of_tenant in rows.items():
        step = step_of(tenant)
        if step is not None:
            answered = step([entries[row] for row in of_tenant])
            for row, reply in zip(of_tenant, answered, strict=True):
                replies[row] = reply
    return replies
