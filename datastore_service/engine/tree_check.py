"""Checks draft trees that another process has made, before anything indexes with them."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from datastore_service.engine.kernel import kernel


class Fault(IntEnum):
    """The first invariant of a DraftTree that does not hold."""

    NONE = 0
    SIZE = 1  # more nodes than the budget has
    PARENTS = 2  # not a node before it
    TOKENS = 3  # outside the vocabulary, or the same as a sibling's
    PROBS = 4  # outside [0, 1], or larger than the parent's
    DEPTH = 5  # deeper than the budget
    CHILDREN = 6  # more of one node than the budget has


def find_faults(
    tokens: np.ndarray,
    parents: np.ndarray,
    probs: np.ndarray,
    sizes: np.ndarray,
    budgets: np.ndarray,
    vocab_size: int,
) -> np.ndarray:
    """The Fault of each tree: int64 [trees].

    tokens, parents: int64, probs: float32, of all trees' nodes one after the other, as in a DraftTree. sizes: int64 [trees], in all
    as many as there are nodes. budgets: int64 [trees, 3], nodes, depth and children of each tree's Budget.
    """
    faults = np.empty(len(sizes), np.int64)
    _find(tokens, parents, probs, sizes, budgets, vocab_size, faults)
    return faults


def load() -> None:
    """Compiles the check, or loads it from Numba's cache, so that no step waits for it."""
    one = np.zeros(1, np.int64)
    find_faults(one, one, np.zeros(1, np.float32), one, np.zeros((1, 3), np.int64), 1)


@kernel
def _find(tokens, parents, probs, sizes, budgets, vocab_size, faults):  # pragma: no cover
    most = 0
    for size in sizes:
        most = max(most, size)
    depths = np.empty(most, np.int64)
    children = np.empty(most + 1, np.int64)  # of node i at i + 1, of the root at 0
    begin = 0
    for tree in range(len(sizes)):
        size = sizes[tree]
        nodes, depth, wide = budgets[tree]
        children[: size + 1] = 0
        fault = 1 if size > nodes else 0
        for node in range(size if fault == 0 else 0):
            at, parent = begin + node, parents[begin + node]
            if parent < -1 or parent >= node:
                fault = 2
                break
            if tokens[at] < 0 or tokens[at] >= vocab_size:
                fault = 3
                break
            above = probs[begin + parent] if parent >= 0 else np.float32(1.0)
            if not (probs[at] >= 0.0 and probs[at] <= above + np.float32(1e-5)):  # NaN is neither
                fault = 4
                break
            depths[node] = depths[parent] + 1 if parent >= 0 else 1
            if depths[node] > depth:
                fault = 5
                break
            if children[parent + 1]:
                for other in range(node):
                    if parents[begin + other] == parent and tokens[begin + other] == tokens[at]:
                        fault = 3
            children[parent + 1] += 1
            if fault == 0 and children[parent + 1] > wide:
                fault = 6
            if fault:
                break
        faults[tree] = fault
        begin += size
