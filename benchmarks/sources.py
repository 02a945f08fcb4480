"""Real text at any size without a download: the Python sources of the installed packages, tokenised once."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from datastore_service.storage.corpus import tokenize

LONGEST = 400_000  # bytes; longer files are generated tables


def source_documents(tokenizer: Tokenizer, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """int32 documents, a source file each, in a random order that is the same on every run with the same packages;
    as many as it takes for `tokens` in all. Raises ValueError if there is less text."""
    documents, size = [], 0
    for document in tokenize(_texts(seed), tokenizer):
        documents.append(document.astype(np.int32))
        size += len(document)
        if size >= tokens:
            return documents
    raise ValueError(f"tokens: the installed packages' sources hold {size}, {tokens} are wanted")


def _texts(seed: int) -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["purelib"])
    files = sorted(path for path in folder.rglob("*.py") if 0 < path.stat().st_size < LONGEST)
    random.Random(seed).shuffle(files)
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a file in another encoding is no loss
            continue
