"""The datastore in the caller's own process, without a service or a socket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from datastore_service.client.base import Datastore
from datastore_service.engine.engine import Engine
from datastore_service.protocol.tenants import Step, step_by_tenant
from datastore_service.protocol.types import Entry, Reply

log = logging.getLogger(__name__)

MOST_TENANTS = 256  # engines; an empty one takes 0.3 MB


class EmbeddedDatastore(Datastore):
    """Steps run in the caller's thread, so `deadline` is not enforced.

    new_engine: makes the engine of each tenant. That of entries without a tenant is made at once, so that a bad prior raises.
    """

    def __init__(self, new_engine: Callable[[], Engine]) -> None:
        self._new_engine = new_engine
        self._engines = {"": new_engine()}
        self._full = False

    @property
    def wants_rejected(self) -> bool:
        return self._engines[""].limits.refusals > 0

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        return step_by_tenant(entries, self._step_of)

    def post(self, entries: Sequence[Entry]) -> None:
        step_by_tenant(entries, self._step_of)

    def close(self) -> None:
        pass

    def _step_of(self, tenant: str) -> Step | None:
        if tenant not in self._engines:
            if len(self._engines) > MOST_TENANTS:
                self._report_full()
                return None
            self._engines[tenant] = self._new_engine()
        return self._engines[tenant].step

    def _report_full(self) -> None:
        if not self._full:
            log.warning("datastore: %d tenants, its limit; nothing is drafted for others", MOST_TENANTS)
        self._full = True
