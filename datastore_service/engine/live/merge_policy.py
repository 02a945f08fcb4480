"""How large the texts of a live tier are, and which of its segments to merge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

FRESH_TOKENS = 1 << 16  # of a fresh text, 3.5 MB with its index
MOST_FRESH_TOKENS = 32 * FRESH_TOKENS  # of all fresh texts, while the older ones wait to be sorted
_CLASS_RATIO = 4  # between two size classes; also how many segments of one class are merged
_MOST_SEGMENTS = 24


def fresh_capacity(limit: int) -> int:
    """Tokens of a fresh text in a tier of at most `limit` tokens."""
    return min(FRESH_TOKENS, limit)


def largest(limit: int) -> int:
    """Most tokens of a segment that is made of several texts, in a tier of at most `limit` tokens: eviction drops a segment at a time."""
    return limit // 4


def parts_of(documents: Sequence[np.ndarray], most: int) -> Iterator[list[np.ndarray]]:
    """The documents in their order, as many at a time as have at most that many tokens, a separator each; at least one."""
    part: list[np.ndarray] = []
    size = 0
    for document in documents:
        if part and size + len(document) + 1 > most:
            yield part
            part, size = [], 0
        part.append(document)
        size += len(document) + 1
    if part:
        yield part


@dataclass(frozen=True, slots=True)
class MergePolicy:
    """Chooses neighbouring segments to merge into one (size-tiered compaction).

    largest: tokens; a segment this large is not merged further, so that eviction drops a part of the tier at a time.
    """

    largest: int

    def next_merge(self, sizes: Sequence[int]) -> slice | None:
        """The run to merge now, None if there is none. sizes: tokens of the segments, oldest first."""
        for size_class in range(_size_class(self.largest)):
            begin = len(sizes)
            while begin and _size_class(sizes[begin - 1]) <= size_class:
                begin -= 1
            run = slice(begin, len(sizes))
            if len(sizes) - begin >= _CLASS_RATIO and sum(sizes[run]) <= self.largest:
                return run
        if len(sizes) > _MOST_SEGMENTS:
            pairs = [older + newer for older, newer in zip(sizes[:-1], sizes[1:], strict=True)]
            smallest = int(np.argmin(pairs))
            return slice(smallest, smallest + 2)
        return None

    def next_full_merge(self, sizes: Sequence[int]) -> slice | None:
        """The oldest run of neighbours that fits into one segment, as long as possible; None if there is none. Repeated
        until then, it leaves as few segments as the policy permits."""
        for begin in range(len(sizes) - 1):
            end, total = begin, 0
            while end < len(sizes) and total + sizes[end] <= self.largest:
                total += sizes[end]
                end += 1
            if end - begin >= 2:
                return slice(begin, end)
        return None


def _size_class(size: int) -> int:
    """0 for sizes up to a fresh text's, 1 up to four times that and so on."""
    size_class = 0
    while size > FRESH_TOKENS * _CLASS_RATIO**size_class:
        size_class += 1
    return size_class
