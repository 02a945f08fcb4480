"""Loads a model's tokenizer. Its library raises plain `Exception`s; here they become StorageError and ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from datastore_service.storage.errors import StorageError
from datastore_service.storage.fingerprint import tokenizer_path


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Loads a tokenizer. Raises StorageError for what the library cannot read.

    folder: holds `tokenizer.json`, or is that file."""
    path = tokenizer_path(folder)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise StorageError(path, "tokenizer", f"cannot be read: {error}") from error


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    """Encodes texts in parallel, without special tokens. Raises ValueError for texts that the tokenizer cannot encode."""
    try:
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:
        raise ValueError(f"the tokenizer cannot encode it: {error}") from error


def check_text(text: str) -> None:
    """Raises ValueError for half a surrogate pair: JSON can hold one, but UTF-8, and so the tokenizer, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(f"not text: lone surrogate U+{half:04X} at character {error.start + 1}") from None
