"""DOUBLE (Shen et al., Double Retrieval Speculative Parallelism): draft model and target both retrieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from datastore_service.client import Datastore
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Status
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Guess, Leaf, OutcomePredictor, Prediction, Retriever, Row
from sglang_patches.drafting.seams import Fallback
from sglang_patches.drafting.union import Part
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.saguaro import Rollouts

if TYPE_CHECKING:
    from sglang_patches.drafting.datastore import DatastoreFeed
    from sglang_patches.ledger.requests import RequestState


GOES_ON = 0.7  # assumed chance that a choice of the draft model is verified: it orders rows


class Guidance(Fallback):
    """The datastore's continuations of the text (where the draft is wrong they go on: correction) and its continuations of the draft
    (extension). budget: of each tree, and of each question."""

    def __init__(self, feed: DatastoreFeed, budget: Budget) -> None:
        self._feed, self._budget = feed, budget

    def parts(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[list[Part]]:
        ends = [deepest_path(tree) for tree in found]
        queries = [
            (Query(tree.tokens[end], self._budget),) if len(tree) else ()
            for tree, end in zip(found, ends, strict=True)
        ]
        answers = self._feed.ask(states, [self._budget] * len(states), queries)
        return [
            [Part(tree), *(Part(extension, int(end[-1])) for extension in extensions)]
            for (tree, extensions), end in zip(answers, ends, strict=True)
        ]


def deepest_path(tree: DraftTree) -> np.ndarray:
    """int64, the nodes down to the tree's deepest, its first one if there are several."""
    size = len(tree)
    if np.array_equal(tree.parents, np.arange(-1, size - 1)):  # a chain, most often
        return np.arange(size)
    at, nodes = int(np.argmax(tree.depths())), []
    while at >= 0:
        nodes.append(at)
        at = int(tree.parents[at])
    return np.array(nodes[::-1], np.int64)


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


class RetrievalChains(Rollouts):
    """One chain after the guess, of gamma = ceil(C) forwards a round and `lookahead` tokens at most. Each forward gives as many tokens
    as the draft model accepts of a phrase, and one more."""

    def __init__(self, lookahead: int, ratio: SpeedRatio) -> None:
        super().__init__(lookahead)
        self._ratio = ratio

    def leaves(self, draft: Draft) -> list[Leaf]:
        return super().leaves(draft) if draft.forwards < self._ratio.value else []


class AllAccepted(OutcomePredictor):
    """One guess: the target follows the draft model's choices down the verified tree and one token beyond it.

    What the target retrieved is in the tree too. Of that the guess passes what the draft model would have chosen.
    """

    def predict(self, draft: Draft, budget: int) -> Prediction:
        end = self._end(draft)
        if end not in draft.candidates:
            return Prediction([], self._chances(draft, end))
        token, chance = (array[0] for array in draft.candidates[end])
        ends = int(token) in draft.sampling.ends
        return Prediction([] if ends else [Guess(end, int(token), float(chance))], {})

    @staticmethod
    def _chances(draft: Draft, node: int) -> dict[int, float]:
        """How likely the path of the draft model's choices, which comes to this node, goes on to each verified node below it."""
        chances = {node: 1.0}
        for above in draft.ends:
            if above in chances:
                below = draft.verified_children(above).values()
                chances |= dict.fromkeys(below, chances[above] * GOES_ON / max(1, len(below)))
        return chances

    @staticmethod
    def _end(draft: Draft) -> int:
        """The last verified node on the path of the draft model's choices, as far as they are known."""
        node = draft.trie.root
        while node in draft.candidates:
            child = draft.verified_children(node).get(int(draft.candidates[node].tokens[0]))
            if child is None:
                break
            node = child
        return node
