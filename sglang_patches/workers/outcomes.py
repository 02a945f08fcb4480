"""What became of the trees that were verified in a step: for a whole batch in one call, because the next launch waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Rejected


def settle(
    trees: Sequence[DraftTree], lengths: Sequence[int], tokens: np.ndarray, spans: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, list[tuple[Rejected, ...]]]:
    """Follows the accepted tokens down the trees.

    lengths: tokens of each session before the step. tokens: int32; those accepted in it are tokens[begin:end] of the tree's span.

    Returns which nodes, all trees' one after the other, lie on the accepted path (bool), and for each tree the drafted tokens
    that were verified and refused: at each depth of the path, the siblings of the token the target chose.
    """
    sizes = np.array([len(tree.tokens) for tree in trees], np.int64)
    drafted = np.concatenate([tree.tokens for tree in trees])
    parents = np.concatenate([tree.parents for tree in trees])
    on_path = np.zeros(len(drafted), np.bool_)
    refused = np.empty(len(drafted), np.int32)
    groups = np.empty((len(drafted), 3), np.int64)
    count = _follow(drafted, parents, sizes, tokens, np.array(spans, np.int64), on_path, refused, groups)
    rejected: list[list[Rejected]] = [[] for _ in trees]
    begin = 0
    for tree, depth, end in groups[:count].tolist():
        rejected[tree].append(Rejected(lengths[tree] + depth, refused[begin:end]))
        begin = end
    return on_path, [tuple(of_tree) for of_tree in rejected]


@numba.njit(cache=True, nogil=True)
def _follow(drafted, parents, sizes, tokens, spans, on_path, refused, groups):  # pragma: no cover
    """Writes the refused tokens group by group, a group being (tree, depth, end of its tokens); returns how many groups."""
    count, total, first = 0, 0, 0
    for tree in range(len(sizes)):
        end = first + sizes[tree]
        at, stop = spans[tree]
        parent, depth = -1, 0
        while True:
            chosen, before = -1, total
            for node in range(first + parent + 1, end):
                if parents[node] != parent:
                    continue
                if chosen < 0 and at < stop and drafted[node] == tokens[at]:
                    chosen = node - first
                else:
                    refused[total] = drafted[node]
                    total += 1
            if total > before:
                groups[count, 0], groups[count, 1], groups[count, 2] = tree, depth, total
                count += 1
            if chosen < 0:
                break
            on_path[first + chosen] = True
            parent, depth, at = chosen, depth + 1, at + 1
        first = end
    return count
