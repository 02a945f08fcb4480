"""Reads prompts from the files that `specstore build` reads corpora from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from datastore_service.storage.corpus import read_documents
from datastore_service.storage.errors import StorageError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks. place: the file and the document in it, for messages."""

    text: str
    place: str


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in one of the rounds in which it is asked.

    round: from 1. The first is answered greedily, each further one is sampled."""

    prompt: Prompt
    round: int


def read_prompts(paths: Sequence[Path], field: str) -> list[Prompt]:
    """One prompt a document (storage.corpus lists the kinds of files).

    Raises StorageError for a file that cannot be read, a prompt of token ids and an empty one; ValueError if there are
    no prompts."""
    prompts = [prompt for path in paths for prompt in _of_file(path, field)]
    if not prompts:
        raise ValueError(f"prompts: none in {', '.join(map(str, paths))}")
    return prompts


def _of_file(path: Path, field: str) -> Iterator[Prompt]:
    for number, document in enumerate(read_documents(path, field), start=1):
        place = f"document {number}"
        if not isinstance(document, str):
            raise StorageError(path, place, "is token ids, and a prompt is text")
        if not document.strip():
            raise StorageError(path, place, "empty prompt")
        yield Prompt(document, f"{path}: {place}")
