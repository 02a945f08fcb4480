"""Documents from files: JSONL, plain text, Parquet rows, or token ids in .npy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
from pyarrow import ArrowInvalid
from tokenizers import Tokenizer

from datastore_service.engine.segment import checked_document
from datastore_service.storage.errors import StorageError

_BATCH_CHARACTERS = 1 << 22
Row = str | np.ndarray


def read_documents(path: Path, field: str) -> Iterator[Row]:
    """The documents of one file, text or token ids.

    .jsonl: `field` of each line, a string or a list of ids. .parquet: the column `field`, likewise. .npy: one
    document of ids for a 1-D array, one a row for a 2-D array. Anything else is one document of UTF-8 text.
    Raises StorageError naming the file and the line or column."""
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".npy": _npy}
    try:
        yield from readers.get(path.suffix, _text)(path, field)
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error


def read_tokens(path: Path, field: str, tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[np.ndarray]:
    """The documents of one file as token ids, all below `vocab_size`. tokenizer: None for a file without text.

    Raises StorageError naming the file and the document, line or column."""
    rows = read_documents(path, field)
    documents = tokenize(rows if tokenizer is not None else _without_text(path, rows), tokenizer)
    for number, tokens in enumerate(documents, start=1):
        try:
            checked = checked_document(tokens, vocab_size)
        except ValueError as error:
            raise StorageError(path, f"document {number}", str(error)) from error
        yield checked


def _without_text(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str):
            raise StorageError(path, f"document {number}", "is text, which needs a tokenizer")
        yield row


def tokenize(rows: Iterator[Row], tokenizer: Tokenizer | None) -> Iterator[np.ndarray]:
    """Token ids of each document, in order; texts are encoded in parallel batches, without special tokens.

    tokenizer: None if no row is text."""
    batch: list[Row] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row)
        if characters >= _BATCH_CHARACTERS:
            yield from _encode(batch, tokenizer)
            batch, characters = [], 0
    yield from _encode(batch, tokenizer)


def groups(documents: Iterator[np.ndarray], limit: int) -> Iterator[list[np.ndarray]]:
    """Consecutive documents of at most `limit` tokens together; a longer one stands alone."""
    group: list[np.ndarray] = []
    size = 0
    for document in documents:
        if group and size + len(document) > limit:
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document)
    if size:
        yield group


def _encode(batch: list[Row], tokenizer: Tokenizer | None) -> Iterator[np.ndarray]:
    texts = [row for row in batch if isinstance(row, str)]
    encoded = iter(() if tokenizer is None else tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for row in batch:
        yield np.array(next(encoded).ids, dtype=np.int64) if isinstance(row, str) else row


def _jsonl(path: Path, field: str) -> Iterator[Row]:
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)[field]
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(
                    path, f"line {number}", f"no JSON object with a field {field!r}"
                ) from error
            yield _row(path, f"line {number}", value)


def _parquet(path: Path, field: str) -> Iterator[Row]:
    try:
        file = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise StorageError(path, "file", f"not Parquet: {error}") from error
    if field not in file.schema_arrow.names:
        raise StorageError(path, field, f"no such column among {file.schema_arrow.names}")
    number = 0
    for batch in file.iter_batches(columns=[field]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield _row(path, f"row {number}", value)


def _npy(path: Path, field: str) -> Iterator[Row]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise StorageError(path, "file", f"not an .npy array: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise StorageError(path, "array", f"{array.ndim}-D {array.dtype}, not 1-D or 2-D integers")
    yield from array if array.ndim == 2 else (array,)


def _text(path: Path, field: str) -> Iterator[Row]:
    try:
        yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StorageError(path, "file", f"not UTF-8 text: {error.reason} at byte {error.start}") from error


def _row(path: Path, place: str, value: object) -> Row:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return np.array(value, dtype=np.int64)
    raise StorageError(path, place, "neither a string nor a list of token ids")
