"""Real text at any size without a download: files of the installed packages, tokenised once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from datastore_service.storage.corpus import tokenize

SUFFIXES = {
    "python": (".py",),
    "c++": (".h", ".hpp", ".cuh", ".cpp"),
    "prose": (".md", ".txt", ".rst"),
    "web": (".js", ".css", ".html", ".json"),
}
LONGEST = 400_000  # bytes; longer files are generated tables


def source_documents(
    tokenizer: Tokenizer, tokens: int, seed: int = 0, kind: str = "python"
) -> list[np.ndarray]:
    """int32 documents, a file each, in a random order that is the same on every run with the same packages; as many as
    it takes for `tokens` in all. kind: of SUFFIXES. Raises ValueError if there is less text."""
    documents, size = [], 0
    for document in tokenize(_texts(seed, SUFFIXES[kind]), tokenizer):
        documents.append(document.astype(np.int32))
        size += len(document)
        if size >= tokens:
            return documents
    raise ValueError(f"tokens: the installed packages' {kind} files hold {size}, {tokens} are wanted")


def _texts(seed: int, suffixes: tuple[str, ...]) -> Iterator[str]:
    folder = Path(np.__file__).parents[1]  # a checkout's own site-packages hold its code alone
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in suffixes and path.is_file() and 0 < path.stat().st_size < LONGEST
    )
    random.Random(seed).shuffle(files)
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a file in another encoding is no loss
            continue
