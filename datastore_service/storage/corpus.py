"""Reads documents from files: JSONL, plain text, Parquet rows, or token ids in .npy."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError

import numpy as np
from tokenizers import Tokenizer

from datastore_service.engine.segment import checked_document
from datastore_service.protocol.types import MAX_VOCAB
from datastore_service.storage.errors import StorageError, shortened
from datastore_service.storage.tokenizer import check_text, encode

_BATCH_CHARACTERS = 1 << 22
Row = str | np.ndarray


def read_documents(path: Path, field: str) -> Iterator[Row]:
    """The documents of one file, text or token ids.

    .jsonl: each line's `field` is a document, a string or a list of ids. .parquet: the same for the column `field`.
    .npy: a 1-D array is one document of ids, each row of a 2-D array is one. Any other file is one document of UTF-8
    text. Text and JSONL may begin with a byte-order mark. The case of a name's end does not matter.
    Raises StorageError naming the file and the line or column, or why it is no corpus."""
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".npy": _npy, ".json": _json}
    check_no_folder(path)
    try:
        yield from readers.get(path.suffix.lower(), _text)(path, field)
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error


def check_no_folder(path: Path) -> None:
    """Raises StorageError for a folder, whose files a shell would list."""
    if path.is_dir():
        raise StorageError(path, "file", "is a folder; name its files, as in FOLDER/*.jsonl")


def read_tokens(path: Path, field: str, tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[np.ndarray]:
    """The documents of one file as token ids below `vocab_size`. tokenizer: None for a file of ids.

    Raises StorageError naming the file and the document, line or column."""
    rows = read_documents(path, field)
    documents = tokenize(rows if tokenizer is not None else _without_text(path, rows), tokenizer)
    number = 0
    try:
        for number, tokens in enumerate(documents, start=1):
            yield _checked(path, number, tokens, vocab_size)
    except ValueError as error:  # from encoding a whole batch of texts
        raise StorageError(path, f"from document {number + 1} on", str(error)) from error


def _checked(path: Path, number: int, tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    try:
        return checked_document(tokens, vocab_size)
    except ValueError as error:
        raise StorageError(path, f"document {number}", str(error)) from error


def _without_text(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str):
            raise StorageError(path, f"document {number}", "is text, which needs a tokenizer")
        yield row


def tokenize(rows: Iterator[Row], tokenizer: Tokenizer | None) -> Iterator[np.ndarray]:
    """Token ids of each document, in order. Texts are encoded in parallel batches, without special tokens.

    tokenizer: None if no row is text. Raises ValueError for a text that it cannot encode."""
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
    """Groups of consecutive documents, at most `limit` tokens in each. A longer document is a group of its own."""
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
    encoded = iter(() if tokenizer is None else encode(tokenizer, texts))
    for row in batch:
        yield np.array(next(encoded).ids, dtype=np.int64) if isinstance(row, str) else row


def _jsonl(path: Path, field: str) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"line {number}"
            text = _decoded(path, place, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            if text.strip():
                yield _row(path, place, _value(path, place, text, field))


def _value(path: Path, place: str, text: str, field: str) -> object:
    try:
        return json.loads(text)[field]
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} at character {error.pos + 1}"
    except ValueError:  # json passes on what Python refuses to read
        reason = f"not JSON: an integer of more than {sys.get_int_max_str_digits()} digits"
    except RecursionError:
        reason = "not JSON: nested too deeply"
    except (KeyError, TypeError):
        reason = f"no JSON object with a field {field!r}"
    raise StorageError(path, place, reason)


def _json(path: Path, field: str) -> Iterator[Row]:
    raise StorageError(
        path, "file", "one JSON value is no corpus; JSONL has one a line, and its name ends in .jsonl"
    )


def _parquet(path: Path, field: str) -> Iterator[Row]:
    from pyarrow import ArrowException  # which takes longer to import than most corpora take to read

    try:
        yield from _parquet_rows(path, field)
    except (ArrowException, UnicodeDecodeError) as error:
        raise StorageError(path, "file", f"not Parquet: {error}") from error


def _parquet_rows(path: Path, field: str) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    if field not in file.schema_arrow.names:
        raise StorageError(path, field, f"no such column among {file.schema_arrow.names}")
    number = 0
    for batch in file.iter_batches(columns=[field]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield _row(path, f"row {number}", value)


def _npy(path: Path, field: str) -> Iterator[Row]:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OverflowError, TokenError) as error:
        raise StorageError(path, "file", f"not an .npy array: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise StorageError(path, "array", f"{array.ndim}-D {array.dtype}, not 1-D or 2-D integers")
    yield from array if array.ndim == 2 else (array,)


def _text(path: Path, field: str) -> Iterator[Row]:
    yield _decoded(path, "file", path.read_bytes().removeprefix(codecs.BOM_UTF8))


def _decoded(path: Path, place: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StorageError(path, place, f"not UTF-8: {error.reason} at byte {error.start + 1}") from error


def _row(path: Path, place: str, value: object) -> Row:
    if isinstance(value, str):
        _check_text(path, place, value)
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        _check_ids(path, place, value)
        return np.array(value, dtype=np.int64)
    raise StorageError(path, place, "neither a string nor a list of token ids")


def _check_text(path: Path, place: str, text: str) -> None:
    try:
        check_text(text)
    except ValueError as error:
        raise StorageError(path, place, str(error)) from error


def _check_ids(path: Path, place: str, ids: list[int]) -> None:
    """Checks that each id fits into the array. The reader does not know the vocabulary's size."""
    if ids and not 0 <= min(ids) <= max(ids) < MAX_VOCAB:
        outside = next(token for token in ids if not 0 <= token < MAX_VOCAB)
        raise StorageError(path, place, f"id {shortened(str(outside))} is outside [0, {MAX_VOCAB})")
