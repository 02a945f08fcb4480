"""The draft side asks the datastore for phrases behind tokens that are not committed (Eq. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datastore_service.client import Datastore
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Status
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Retriever, Row


class DatastorePhrases(Retriever):
    """Asks about sessions that the worker keeps in the datastore, as in a service that both use. Text that the worker may not have
    sent is part of the question. depth: d, most tokens of a phrase. deadline: seconds that an answer may take."""

    def __init__(self, datastore: Datastore, depth: int, deadline: float) -> None:
        self._datastore, self._depth, self._deadline = datastore, depth, deadline

    def phrases(self, rows: Sequence[Row], nodes: int) -> list[DraftTree]:
        budget = Budget(min(nodes, self._depth))
        asked: dict[Draft, list[int]] = {}
        for at, row in enumerate(rows):
            asked.setdefault(row.draft, []).append(at)
        entries = [
            self._entry(draft, tuple(_query(*rows[at], budget) for at in places))
            for draft, places in asked.items()
        ]
        found = [EMPTY_TREE] * len(rows)
        replies = self._datastore.step(entries, self._deadline)
        for (draft, places), reply in zip(asked.items(), replies, strict=True):
            if reply.status is not Status.OK:
                self._refused(draft)
            for at, tree in zip(places, reply.trees, strict=False):  # none unless the status is OK
                found[at] = tree
        return found

    def _entry(self, draft: Draft, queries: tuple[Query, ...]) -> Entry:
        return Entry(draft.session, draft.confirmed, queries=queries, tenant=draft.tenant)

    def _refused(self, draft: Draft) -> None:
        """The datastore has not heard of the session yet, or no longer has it. The worker sends it."""


@dataclass(slots=True)
class _Session:
    name: str
    sent: int = 0


class OwnDatastorePhrases(DatastorePhrases):
    """The datastore is this process's own: it is told of every text here, and keeps the outputs of requests that end, if they may be
    published."""

    def __init__(self, datastore: Datastore, depth: int, deadline: float) -> None:
        super().__init__(datastore, depth, deadline)
        self._sessions: dict[Draft, _Session] = {}
        self._opened = 0

    def closed(self, draft: Draft) -> None:
        self.forgotten(draft)
        if draft.published_from is not None:
            opening = Opening(prompt_length=draft.published_from)
            text, name = draft.text.after(0).copy(), f"{draft.session}/output"
            whole = Entry(name, 0, text, opening=opening, closing=True, tenant=draft.tenant)
            self._datastore.post([whole])

    def forgotten(self, draft: Draft) -> None:
        session = self._sessions.pop(draft, None)
        if session is not None:
            self._datastore.post([Entry(session.name, closing=True, tenant=draft.tenant)])

    def _entry(self, draft: Draft, queries: tuple[Query, ...]) -> Entry:
        session = self._sessions.get(draft)
        opening = None if session else Opening(publish=False)  # what is verified now may be taken back
        if session is None:
            self._opened += 1
            session = self._sessions[draft] = _Session(str(self._opened))
        start, session.sent = session.sent, draft.confirmed
        tokens = draft.text.between(start, draft.confirmed)
        return Entry(session.name, start, tokens, opening=opening, queries=queries, tenant=draft.tenant)

    def _refused(self, draft: Draft) -> None:
        """There was no room for it: it is opened again."""
        self._sessions.pop(draft, None)


def _query(draft: Draft, node: int, budget: Budget) -> Query:
    """What would follow the node."""
    path = [draft.trie.token(at) for at in draft.trie.path(node)]
    return Query(np.concatenate([draft.text.after(draft.confirmed), np.array(path, np.int32)]), budget)
