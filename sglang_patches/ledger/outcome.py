"""The outcomes of a step, and who hears of them. One call computes a whole batch, because the next launch waits for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numba
import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Rejected

if TYPE_CHECKING:
    from sglang_patches.ledger.requests import RequestState


@dataclass(slots=True, eq=False)
class Outcome:
    """One request's share of a step.

    start: tokens of the request before the step. tokens: int32, what was emitted: the accepted path, then the target's own token.
    tree: what was verified, empty in a plain step. accepted: bool, which of its nodes lie on the path. refused: at each depth
    of the path, the siblings of the token that the target chose. predicted: what the request's own reference proposed, among others.
    """

    request: RequestState
    start: int
    tokens: np.ndarray
    tree: DraftTree
    accepted: np.ndarray
    refused: tuple[Rejected, ...]
    predicted: DraftTree = EMPTY_TREE


def settle(
    requests: Sequence[RequestState],
    trees: Sequence[DraftTree],
    starts: Sequence[int],
    emitted: Sequence[np.ndarray],
) -> list[Outcome]:
    """The outcomes of a step. Each argument holds one field of `Outcome` for every request."""
    if not requests:
        return []
    sizes = [len(tree.tokens) for tree in trees]
    ends = list(itertools.accumulate(sizes))
    on_path = np.zeros(ends[-1], np.bool_)
    refused = _refused(trees, sizes, starts, emitted, on_path) if ends[-1] else [()] * len(trees)
    accepted = [on_path[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return list(map(Outcome, requests, starts, emitted, trees, accepted, refused))


def _refused(
    trees: Sequence[DraftTree],
    sizes: Sequence[int],
    starts: Sequence[int],
    emitted: Sequence[np.ndarray],
    on_path: np.ndarray,
) -> list[tuple[Rejected, ...]]:
    """Follows the emitted tokens down the trees and marks the nodes on the path, all trees' one after the other."""
    drafted = np.concatenate([tree.tokens for tree in trees])
    parents = np.concatenate([tree.parents for tree in trees])
    refused = np.empty(len(drafted), np.int32)
    groups = np.empty((len(drafted), 3), np.int64)
    lengths = np.array([(size, len(tokens)) for size, tokens in zip(sizes, emitted, strict=True)])
    count = _follow(drafted, parents, lengths, np.concatenate(emitted), on_path, refused, groups)
    rejected: list[list[Rejected]] = [[] for _ in trees]
    begin = 0
    for tree, depth, end in groups[:count].tolist():
        rejected[tree].append(Rejected(starts[tree] + depth, refused[begin:end]))
        begin = end
    return [tuple(of_tree) for of_tree in rejected]


@numba.njit(cache=True, nogil=True)
def _follow(drafted, parents, lengths, tokens, on_path, refused, groups):  # pragma: no cover
    """Writes the refused tokens group by group and returns the number of groups. A group is (tree, depth, end of its tokens).
    lengths: int64 [trees, 2], numbers of nodes and of emitted tokens."""
    count, total, first, begin = 0, 0, 0, 0
    for tree in range(len(lengths)):
        end, stop = first + lengths[tree, 0], begin + lengths[tree, 1]
        parent, depth, at = -1, 0, begin
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
        first, begin = end, stop
    return count


class Follower:
    """Hears of requests in this order: each is opened, outcomes of its steps follow, and it is closed. What a follower has no use for
    it passes over. One that fails is behind, never wrong.
    """

    def open(self, states: Iterable[RequestState]) -> None:
        """Requests begin, with their texts as far as their outcome is known."""

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        """Steps of requests have ended so."""

    def taken_back(self, states: Iterable[RequestState]) -> None:
        """The last step of these requests did not happen: SGLang dropped its result."""

    def close(self, states: Iterable[RequestState]) -> None:
        """Requests have ended."""

    def drop(self, states: Iterable[RequestState]) -> None:
        """All requests are forgotten, with what is not told of them yet."""
