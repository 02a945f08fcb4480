"""Slow, obvious versions of what the engine's kernels do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Document = Sequence[int]


def occurrences(documents: Sequence[Document], prefix: Document) -> list[tuple[int, int]]:
    """(document, position) of every place where a prefix occurs within one document."""
    size = len(prefix)
    return [
        (number, start)
        for number, document in enumerate(documents)
        for start in range(len(document) - size + 1)
        if list(document[start : start + size]) == list(prefix)
    ]


def match_length(document: Document, end: int, context: Document, most: int) -> int:
    """How many tokens before document[end] equal the end of the context."""
    match = 0
    while match < min(most, end, len(context)) and document[end - 1 - match] == context[-1 - match]:
        match += 1
    return match


def next_counts(text: Document, size: int) -> Counter[int]:
    """What followed earlier occurrences of the last `size` tokens of a text: Algorithm 1's counts."""
    end = list(text[-size:])
    return Counter(
        text[start + size] for start in range(len(text) - size) if list(text[start : start + size]) == end
    )
