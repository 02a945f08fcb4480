"""The union of a request's trees: one tree of the nodes that are likeliest to be accepted, whoever proposed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numba
import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import MAX_NODES, Budget

# Trees and whose they are -> estimated acceptance of all their nodes, one tree's after the other.
Estimate = Callable[[Sequence[DraftTree], Sequence[str]], np.ndarray]


class Part(NamedTuple):
    """A tree of a request. anchor: the node of the request's first tree that it continues, -1 if it continues the text."""

    tree: DraftTree
    anchor: int = -1


def best_trees(
    parts: Sequence[Sequence[Part]], tenants: Sequence[str], estimate: Estimate, budget: Budget
) -> list[DraftTree]:
    """Makes each request's best tree of its parts: a part that is alone stays as it is, unless the target verifies chains only."""
    trees = [next((part.tree for part in of if len(part.tree)), EMPTY_TREE) for of in parts]
    alone = int(budget.children > 1)
    rows = [row for row, of in enumerate(parts) if sum(len(part.tree) > 0 for part in of) > alone]
    made = united([parts[row] for row in rows], [tenants[row] for row in rows], estimate, budget)
    for row, tree in zip(rows, made, strict=True):
        trees[row] = tree
    return trees


def first_trees(parts: Sequence[Sequence[Part]]) -> list[DraftTree]:
    """The tree of each request's first part, empty where it has none."""
    return [of[0].tree if of else EMPTY_TREE for of in parts]


def united(
    parts: Sequence[Sequence[Part]], tenants: Sequence[str], estimate: Estimate, budget: Budget
) -> list[DraftTree]:
    """The union of each request's parts, by what its tenant's texts have taught. tenants: whose each request is."""
    if not parts:
        return []
    trees = whole_estimates(parts)
    whose = [tenant for tenant, of in zip(tenants, parts, strict=True) for _ in of]
    return unions(parts, trees, estimate(trees, whose), budget.nodes, budget.children)


def whole_estimates(parts: Sequence[Sequence[Part]]) -> list[DraftTree]:
    """The trees of all parts, with estimates for the whole path below the text: a part that continues a node has them below it."""
    return [_scaled(part, of_request[0].tree) for of_request in parts for part in of_request]


def _scaled(part: Part, first: DraftTree) -> DraftTree:
    tree, anchor = part
    if anchor < 0:
        return tree
    return DraftTree(tree.tokens, tree.parents, first.probs[anchor] * tree.probs, tree.sources)


def unions(
    parts: Sequence[Sequence[Part]],
    trees: Sequence[DraftTree],
    chances: np.ndarray,
    nodes: int,
    children: int = MAX_NODES,
) -> list[DraftTree]:
    """Makes each request's tree of the likeliest `nodes` nodes of its parts' paths, best first. A node that is in several parts counts
    with its largest chance, and the tree with that chance gives its estimate and source.

    trees: as of `whole_estimates`.
    chances: float64, estimated acceptance of all their nodes, one tree's after the other.
    children: most of a node.
    """
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
    _unite(shape, anchors, *given, chances, children, *found, counts)
    return [
        DraftTree(*(array[row, :count] for array in found)) if count else EMPTY_TREE
        for row, count in enumerate(counts.tolist())
    ]


@numba.njit(cache=True, nogil=True)
def _unite(  # pragma: no cover
    shape, anchors, tokens, parents, probs, sources, chances, children,
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
    room = np.empty(total + 1, np.int64)  # for children, of each node of the union; the root's comes last
    worth = np.empty(total, np.float64)  # of the union's nodes: the one with the largest is taken first
    best_below = np.empty(total + 1, np.float64)
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
        for node in range(size):
            taken[node], worth[node] = -1, chances[union[node]]
        room[:] = children
        if children == 1:  # of two branches the one whose path brings more
            best_below[: size + 1] = 0.0
            for node in range(size - 1, -1, -1):
                worth[node] += best_below[node]
                parent = above[node] if above[node] >= 0 else size
                best_below[parent] = max(best_below[parent], worth[node])
        for at in range(min(nodes, size)):
            best = -1
            for node in range(size):
                if taken[node] >= 0 or (above[node] >= 0 and taken[above[node]] < 0):
                    continue
                if room[above[node]] == 0:
                    continue
                if best < 0 or worth[node] > worth[best]:
                    best = node
            if best < 0:
                break
            taken[best] = at
            room[above[best]] -= 1
            given, parent = union[best], above[best]
            out_tokens[request, at], out_sources[request, at] = tokens[given], sources[given]
            out_parents[request, at] = -1 if parent < 0 else taken[parent]
            limit = 1.0 if parent < 0 else out_probs[request, taken[parent]]
            out_probs[request, at] = min(probs[given], limit)
            counts[request] = at + 1
