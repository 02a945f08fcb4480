"""DOUBLE (Shen et al., Double Retrieval Speculative Parallelism): draft model and target both retrieve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from datastore_service.client import Datastore
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Status
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Guess, Leaf, OutcomePredictor, Prediction, Retriever, Row
from sglang_patches.drafting.seams import Fallback
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.saguaro import Rollouts

if TYPE_CHECKING:
    from sglang_patches.drafting.datastore import DatastoreFeed
    from sglang_patches.ledger.requests import RequestState


# Trees and whose they are -> estimated acceptance of all their nodes, one tree's after the other.
Estimate = Callable[[Sequence[DraftTree], Sequence[str]], np.ndarray]
GOES_ON = 0.7  # assumed chance that a choice of the draft model is verified: it orders rows


class Part(NamedTuple):
    """A tree of a request. anchor: the node of the request's first tree that it continues, -1 if it continues the text."""

    tree: DraftTree
    anchor: int = -1


def whole_estimates(parts: Sequence[Sequence[Part]]) -> list[DraftTree]:
    """The trees of all parts, with estimates for the whole path below the text: a part that continues a node has them below it."""
    return [_scaled(part, of_request[0].tree) for of_request in parts for part in of_request]


def _scaled(part: Part, first: DraftTree) -> DraftTree:
    tree, anchor = part
    if anchor < 0:
        return tree
    return DraftTree(tree.tokens, tree.parents, first.probs[anchor] * tree.probs, tree.sources)


def unions(
    parts: Sequence[Sequence[Part]], trees: Sequence[DraftTree], chances: np.ndarray, nodes: int
) -> list[DraftTree]:
    """Makes each request's tree of the likeliest `nodes` nodes of its parts' paths, best first. A node that is in several parts counts
    with its largest chance, and the tree with that chance gives its estimate and source.

    trees: as of `whole_estimates`.
    chances: float64, estimated acceptance of all their nodes, one tree's after the other.
    """
    if not parts:
        return []
    shape = np.array([(len(tree), row) for row, of in enumerate(parts) for tree, _ in of], np.int64)
    anchors = np.array([part.anchor for of in parts for part in of], np.int64)
    given = [np.concatenate([getattr(tree, name) for tree in trees]) for name in DraftTree.__slots__]
    size = len(parts), nodes
    found = (
        np.empty(size, np.int32),
        np.empty(size, np.int32),
        np.empty(size, np.float32),
        np.empty(size, np.uint8),
    )
    counts = np.zeros(len(parts), np.int64)
    _unite(shape, anchors, *given, chances, *found, counts)
    return [
        DraftTree(*(array[row, :count] for array in found)) if count else EMPTY_TREE
        for row, count in enumerate(counts.tolist())
    ]


@numba.njit(cache=True, nogil=True)
def _unite(  # pragma: no cover
    shape, anchors, tokens, parents, probs, sources, chances,
    out_tokens, out_parents, out_probs, out_sources, counts,
):  # fmt: skip
    """Writes the requests' trees into the arrays `out_*`, and their sizes into `counts`.

    shape: int64 [trees, 2], each tree's size and request, a request's trees one after the other.
    counts: number of nodes, by request.
    """
    nodes = out_tokens.shape[1]
    total = len(tokens)
    above = np.empty(total, np.int64)  # of each node of the union, -1 for the root
    union = np.empty(total, np.int64)  # the given node that stands for it: the likeliest
    place = np.empty(total, np.int64)  # of the given nodes in the union
    taken = np.empty(total, np.int64)  # place of the union's nodes in the result, -1 for none
    tree, begin = 0, 0
    while tree < len(shape):
        request, size, first = shape[tree, 1], 0, begin
        while tree < len(shape) and shape[tree, 1] == request:
            end = begin + shape[tree, 0]
            root = -1 if anchors[tree] < 0 else place[first + anchors[tree]]
            for node in range(begin, end):
                parent = root if parents[node] < 0 else place[begin + parents[node]]
                there = -1
                for other in range(size):
                    if above[other] == parent and tokens[union[other]] == tokens[node]:
                        there = other
                        break
                if there < 0:
                    there = size
                    above[there], union[there] = parent, node
                    size += 1
                elif chances[node] > chances[union[there]]:
                    union[there] = node
                place[node] = there
            begin, tree = end, tree + 1
        taken[:size] = -1
        for at in range(min(nodes, size)):
            best = -1
            for node in range(size):
                if taken[node] >= 0 or (above[node] >= 0 and taken[above[node]] < 0):
                    continue
                if best < 0 or chances[union[node]] > chances[union[best]]:
                    best = node
            taken[best] = at
            given, parent = union[best], above[best]
            out_tokens[request, at], out_sources[request, at] = tokens[given], sources[given]
            out_parents[request, at] = -1 if parent < 0 else taken[parent]
            limit = 1.0 if parent < 0 else out_probs[request, taken[parent]]
            out_probs[request, at] = min(probs[given], limit)
            counts[request] = at + 1


class Guidance(Fallback):
    """One tree of the draft, of the datastore's continuations of the text (where the draft is wrong they go on: correction) and of its
    continuations of the draft (extension). budget: of each tree, and of each question. estimate: of acceptance, by what was seen."""

    def __init__(self, feed: DatastoreFeed, budget: Budget, estimate: Estimate) -> None:
        self._feed, self._budget, self._estimate = feed, budget, estimate

    def trees(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[DraftTree]:
        ends = [deepest_path(tree) for tree in found]
        queries = [
            (Query(tree.tokens[end], self._budget),) if len(tree) else ()
            for tree, end in zip(found, ends, strict=True)
        ]
        answers = self._feed.ask(states, [self._budget] * len(states), queries)
        trees = [tree for tree, _ in answers]
        drafted = [row for row, tree in enumerate(found) if len(tree)]
        parts = [
            [
                Part(found[row]),
                Part(trees[row]),
                *(Part(extension, int(ends[row][-1])) for extension in answers[row][1]),
            ]
            for row in drafted
        ]
        tenants = [states[row].tenant for row in drafted]
        for row, union in zip(drafted, self._united(parts, tenants), strict=True):
            trees[row] = union
        return trees

    def _united(self, parts: Sequence[Sequence[Part]], tenants: Sequence[str]) -> list[DraftTree]:
        if not parts:
            return []
        trees = whole_estimates(parts)
        whose = [tenant for tenant, of in zip(tenants, parts, strict=True) for _ in of]
        return unions(parts, trees, self._estimate(trees, whose), self._budget.nodes)


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
