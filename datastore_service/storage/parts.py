"""The parts of a corpus, and the segments that are built from one.

Nothing of a part depends on another. So parts can be built one after the other or by many machines at a time, with the same
segments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from tokenizers import Tokenizer

from datastore_service.engine.segment import Segment, build_segment
from datastore_service.storage.corpus import groups, read_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive files of a corpus. skipped: its leading documents that are not built, because segments hold them already."""

    number: int
    paths: tuple[Path, ...]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the building of every part needs. segment_tokens: most tokens of a segment that has several documents."""

    tokenizer: Tokenizer
    field: str
    vocab_size: int
    segment_tokens: int


@dataclass(frozen=True, slots=True)
class Built:
    """A segment of a part. documents: how many of the part's documents it and the segments before it hold."""

    part: int
    documents: int
    segment: Segment


# Builds parts; the segments come in the order of the parts and of their documents.
PartBuilder = Callable[[Recipe, Sequence[Part]], Iterator[Built]]


def parts_of(paths: Sequence[Path], limit: int) -> list[Part]:
    """Groups of consecutive files, at most `limit` bytes in each. A larger file is a part of its own."""
    parts: list[list[Path]] = []
    size = 0
    for path in paths:
        length = path.stat().st_size
        if not parts or size + length > limit:
            parts.append([])
            size = 0
        parts[-1].append(path)
        size += length
    return [Part(number, tuple(part)) for number, part in enumerate(parts)]


def build_part(recipe: Recipe, part: Part, threads: int) -> Iterator[Built]:
    """The same segments wherever it runs. threads: used for sorting. Raises StorageError for a file that cannot be read."""
    corpus = chain.from_iterable(
        read_tokens(path, recipe.field, recipe.tokenizer, recipe.vocab_size) for path in part.paths
    )
    documents = part.skipped
    for group in groups(islice(corpus, part.skipped, None), recipe.segment_tokens):
        documents += len(group)
        yield Built(part.number, documents, build_segment(group, recipe.vocab_size, threads))


def build_here(recipe: Recipe, parts: Sequence[Part]) -> Iterator[Built]:
    """Builds one part after the other in this process."""
    for part in parts:
        yield from build_part(recipe, part, os.cpu_count() or 1)
