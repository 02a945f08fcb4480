"""A user of a datastore that keeps what it tells, as the worker's feed does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from datastore_service.client import Datastore, Texts
from datastore_service.protocol.types import Entry, Reply


class Remembering(Texts):
    """A datastore, and the texts of its sessions.

    opened: makes the datastore, which reads here what it has been told.
    """

    def __init__(self, opened: Callable[[Texts], Datastore]) -> None:
        self._openings: dict[str, Entry] = {}
        self._tokens: dict[str, np.ndarray] = {}
        self.datastore = opened(self)

    def __getattr__(self, name: str) -> object:
        return getattr(self.datastore, name)

    def told(self, session: str, known: int) -> Entry | None:
        first = self._openings.get(session)
        if first is None:
            return None
        opening = None if known else first.opening
        return Entry(session, known, self._tokens[session][known:], opening=opening, tenant=first.tenant)

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        self._keep(entries)
        replies = self.datastore.step(entries, deadline)
        self._forget(entries)
        return replies

    def post(self, entries: Sequence[Entry]) -> None:
        self._keep(entries)
        self.datastore.post(entries)
        self._forget(entries)

    def _keep(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.opening is not None and entry.session not in self._openings:
                self._openings[entry.session], self._tokens[entry.session] = entry, np.empty(0, np.int32)
            known = self._tokens.get(entry.session)
            if known is not None and entry.start <= len(known):
                self._tokens[entry.session] = np.concatenate(
                    [known, entry.tokens[len(known) - entry.start :]]
                )

    def _forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.closing:
                self._openings.pop(entry.session, None)
                self._tokens.pop(entry.session, None)
