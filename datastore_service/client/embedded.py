"""The datastore in the caller's own process, without a service or a socket."""

from __future__ import annotations

from collections.abc import Sequence

from datastore_service.client.base import Datastore
from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import Entry, Reply


class EmbeddedDatastore(Datastore):
    """Steps run in the caller's thread, so `deadline` is not enforced."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def wants_rejected(self) -> bool:
        return self._engine.limits.refusals > 0

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        return self._engine.step(entries)

    def post(self, entries: Sequence[Entry]) -> None:
        self._engine.step(entries)

    def close(self) -> None:
        pass
