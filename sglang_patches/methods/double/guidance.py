"""The target's retrieval: what the datastore knows is verified with the draft, in one forward (section 4.2, Eq. 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget, Query
from sglang_patches.drafting.fallback import Fallback
from sglang_patches.methods.double.union import Part, unions, whole_estimates

if TYPE_CHECKING:
    from sglang_patches.drafting.datastore import DatastoreFeed
    from sglang_patches.ledger.requests import RequestState

# Trees and whose they are -> estimated acceptance of all their nodes, one tree's after the other.
Estimate = Callable[[Sequence[DraftTree], Sequence[str]], np.ndarray]


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
