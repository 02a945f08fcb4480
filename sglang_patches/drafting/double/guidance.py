"""The target's retrieval: what the datastore knows is verified with the draft, in one forward (section 4.2, Eq. 6)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget, Query
from sglang_patches.drafting.fallback import Fallback

if TYPE_CHECKING:
    from sglang_patches.drafting.datastore import DatastoreFeed
    from sglang_patches.drafting.requests import RequestState

# Trees and whose they are -> estimated acceptance of all their nodes, one tree's after the other.
Estimate = Callable[[Sequence[DraftTree], Sequence[str]], np.ndarray]


class Guidance(Fallback):
    """One tree of the draft, of the datastore's continuations of the text (where the draft is wrong they go on: correction) and of its
    continuations of the draft (extension). budget: of each tree, and of each question. estimate: of acceptance, by what was seen."""

    def __init__(self, feed: DatastoreFeed, budget: Budget, estimate: Estimate) -> None:
        self._feed, self._budget, self._estimate = feed, budget, estimate

    def trees(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[DraftTree]:
        budgets = [self._budget] * len(states)
        ends = [_deepest(tree) if len(tree) else [] for tree in found]
        queries = [
            (Query(tree.tokens[end], self._budget),) if end else ()
            for tree, end in zip(found, ends, strict=True)
        ]
        answers = self._feed.ask(states, budgets, queries)
        return [
            self._joined(state.tenant, tree, end, *answer) if len(tree) else answer[0]
            for state, tree, end, answer in zip(states, found, ends, answers, strict=True)
        ]

    def _joined(
        self,
        tenant: str,
        drafted: DraftTree,
        end: Sequence[int],
        correction: DraftTree,
        extensions: Sequence[DraftTree],
    ) -> DraftTree:
        parts = [drafted, correction]
        parts += [continued(drafted, end, extension) for extension in extensions if len(extension)]
        chances = self._estimate(parts, [tenant] * len(parts))
        return joined(parts, chances, self._budget.nodes)


def _deepest(tree: DraftTree) -> list[int]:
    """The nodes down to the tree's deepest, its first one if there are several."""
    at, nodes = int(np.argmax(tree.depths())), []
    while at >= 0:
        nodes.append(at)
        at = int(tree.parents[at])
    return nodes[::-1]


def continued(drafted: DraftTree, path: Sequence[int], extension: DraftTree) -> DraftTree:
    """The path of the drafted tree, and behind it the extension. A node's estimate is for the whole path."""
    size, last = len(path), list(path)
    reached = drafted.probs[last[-1]]
    return DraftTree(
        np.concatenate([drafted.tokens[last], extension.tokens]),
        np.concatenate([np.arange(-1, size - 1), extension.parents + size]).astype(np.int32),
        np.concatenate([drafted.probs[last], reached * extension.probs]).astype(np.float32),
        np.concatenate([drafted.sources[last], extension.sources]),
    )


def joined(trees: Sequence[DraftTree], chances: np.ndarray, nodes: int) -> DraftTree:
    """The union of the trees' paths, its likeliest `nodes` nodes, best first.

    chances: float64, estimated acceptance of all their nodes, one tree's after the other. Of a path in several trees the likeliest
    counts, and its tree gives the node's estimate and source.
    """
    children: list[dict[int, int]] = [{}]  # of a node of the union by token; node 0 is the root
    best: list[tuple[float, float, int]] = [(1.0, 1.0, 0)]  # chance, estimate and source of each
    values = iter(chances.tolist())
    for tree in trees:
        place: list[int] = []
        rows = zip(*(a.tolist() for a in (tree.parents, tree.tokens, tree.probs, tree.sources)), strict=True)
        for parent, token, estimate, source in rows:
            siblings = children[0 if parent < 0 else place[parent]]
            node = siblings.setdefault(token, len(children))
            found = next(values), estimate, source
            if node == len(children):
                children.append({})
                best.append(found)
            elif found > best[node]:
                best[node] = found
            place.append(node)
    return _best_first(children, best, nodes)


def _best_first(
    children: Sequence[dict[int, int]], best: Sequence[tuple[float, float, int]], nodes: int
) -> DraftTree:
    waiting = [(-best[child][0], child, token, -1, 1.0) for token, child in children[0].items()]
    heapq.heapify(waiting)
    rows: list[tuple[int, int, float, int]] = []
    while waiting and len(rows) < nodes:
        negative, node, token, parent, above = heapq.heappop(waiting)
        _, estimate, source = best[node]
        estimate = min(estimate, above)
        at = len(rows)
        rows.append((token, parent, estimate, source))
        for after, child in children[node].items():
            heapq.heappush(waiting, (max(negative, -best[child][0]), child, after, at, estimate))
    if not rows:
        return EMPTY_TREE
    tokens, parents, estimates, sources = zip(*rows, strict=True)
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(estimates, np.float32),
        np.array(sources, np.uint8),
    )
