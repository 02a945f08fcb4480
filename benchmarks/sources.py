"""Real text at any size without a download: files of named packages, of the versions in the lock file, tokenised once."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from importlib.metadata import version
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
# By kind, the folders whose files are read.
PACKAGES = {
    "python": ("numba", "pandas", "scipy", "sympy", "transformers"),
    "c++": ("tilelang", "torch"),
    "prose": ("ray", "sglang", "tilelang", "timm"),
    "web": ("kubernetes_validate", "ray", "sglang", "torch"),
}
LONGEST = 400_000  # bytes; longer files are generated tables


def source_documents(
    tokenizer: Tokenizer, tokens: int, seed: int = 0, kind: str = "python"
) -> list[np.ndarray]:
    """int32 documents, a file each, in a random order that is the same on every machine with the lock file's packages; as many as
    it takes for `tokens` in all. kind: of SUFFIXES. Raises ValueError if there is less text."""
    documents, size = [], 0
    for document in tokenize(texts(kind, seed), tokenizer):
        documents.append(document.astype(np.int32))
        size += len(document)
        if size >= tokens:
            return documents
    raise ValueError(f"tokens: the packages' {kind} files hold {size}, {tokens} are wanted")


def versions(kind: str) -> dict[str, str]:
    """The packages whose files are a kind's text, with what is installed of them."""
    return {name: version(name.replace("_", "-")) for name in PACKAGES[kind]}


def digest(documents: Sequence[np.ndarray]) -> str:
    """Names a text: SHA-256 of its tokens."""
    whole = hashlib.sha256()
    for document in documents:
        whole.update(len(document).to_bytes(4, "little") + document.astype("<i4").tobytes())
    return whole.hexdigest()


def texts(kind: str = "python", seed: int = 0) -> Iterator[str]:
    """The files of a kind, in a random order."""
    packages = Path(np.__file__).parents[1]  # a checkout's own site-packages hold its code alone
    files = sorted(
        path
        for package in PACKAGES[kind]
        for path in (packages / package).rglob("*")
        if path.suffix in SUFFIXES[kind] and path.is_file() and 0 < path.stat().st_size < LONGEST
    )
    random.Random(seed).shuffle(files)
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a file in another encoding is no loss
            continue
