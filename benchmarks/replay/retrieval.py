"""Retrieval of others, written anew: prompt lookup decoding (Saxena 2023) and REST (He et al., 2024)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.replay.method import Method, chain_of, tree_of
from datastore_service.engine.segment import Segment
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree

LONGEST_LOOKUP = 3  # tokens looked up, down to one: the setting of prompt lookup
LONGEST, SHORTEST = 16, 2  # tokens of a suffix
SAMPLES = 5000  # occurrences read
CONTINUATION = 10  # tokens of each


class PromptLookup(Method):
    """What followed the last tokens where they first stood in this text."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def draft(self, text: np.ndarray) -> DraftTree:
        for length in range(min(LONGEST_LOOKUP, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
            found = np.flatnonzero((windows == text[-length:]).all(axis=1))
            if len(found):
                follow = int(found[0]) + length
                return chain_of(text[follow : follow + self._nodes].tolist())
        return EMPTY_TREE


class Rest(Method):
    """The longest suffix of the text that the prior holds, at most one segment, and the most frequent beginnings of what follows it
    there. The constants are REST's; the suffix array is ours."""

    def __init__(self, prior: Sequence[Segment], nodes: int) -> None:
        self._nodes = nodes
        self._tokens: list[int] = prior[0].tokens.tolist() if prior else []
        self._rows: list[int] = prior[0].suffix_array().tolist() if prior else []
        self._separator = prior[0].separator if prior else -1

    def draft(self, text: np.ndarray) -> DraftTree:
        for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            places = self._find(text[-length:].tolist())
            if len(places):
                return self._tree(places)
        return EMPTY_TREE

    def _find(self, wanted: list[int]) -> list[int]:
        """Where the text after each occurrence begins."""

        def prefix(row: int) -> list[int]:
            return self._tokens[row : row + len(wanted)]

        low = bisect_left(self._rows, wanted, key=prefix)
        high = bisect_right(self._rows, wanted, lo=low, key=prefix)
        return [row + len(wanted) for row in self._rows[low : min(high, low + SAMPLES)]]

    def _tree(self, places: Sequence[int]) -> DraftTree:
        """The most frequent beginnings, which with each hold its own beginnings: those are at least as frequent."""
        counts: Counter[tuple[int, ...]] = Counter()
        for place in places:
            following = self._tokens[place : place + CONTINUATION]
            if self._separator in following:
                following = following[: following.index(self._separator)]
            counts.update(tuple(following[:end]) for end in range(1, len(following) + 1))
        likeliest = sorted(counts, key=lambda path: (-counts[path], len(path)))[: self._nodes]
        place_of = {path: node for node, path in enumerate(likeliest)}
        return tree_of([path[-1] for path in likeliest], [place_of.get(path[:-1], -1) for path in likeliest])
