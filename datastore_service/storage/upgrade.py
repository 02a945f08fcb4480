"""Rewrites files of a prior that have an old format: what `specstore upgrade` does.

Version 1 had the suffix array as int32. In place of the keys it had a table of four uint32 tokens for every 64th row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from datastore_service.engine.segment import Segment, assemble_segment, checksum_of, token_dtype
from datastore_service.storage.directory_lock import DirectoryLock
from datastore_service.storage.errors import StorageError
from datastore_service.storage.manifest import has_old_format, read_manifest, write_manifest
from datastore_service.storage.segment_file import (
    HEADER_BYTES,
    format_version,
    read_header,
    write_segment,
)

_ALIGNMENT = 64


def upgrade_segments(directory: Path | str, progress: Callable[[str], None] = lambda _: None) -> int:
    """Rewrites a directory's segment files one by one, then its manifest. Each is replaced atomically, so an interrupted
    run can be repeated.

    progress is called with each file's name. Returns how many were rewritten. Raises StorageError for a damaged file and for a directory
    that another process writes to."""
    with DirectoryLock(Path(directory)):
        return _upgrade(Path(directory), progress)


def _upgrade(directory: Path, progress: Callable[[str], None]) -> int:
    rewritten = 0
    manifest = read_manifest(directory)
    for name in manifest.segments:
        path = directory / name
        if format_version(path) == 1:
            segment, tokenizer = _read_version_1(path)
            write_segment(path, segment, tokenizer)
            progress(name)
            rewritten += 1
    if has_old_format(directory):
        write_manifest(directory, manifest)
    return rewritten


def _read_version_1(path: Path) -> tuple[Segment, str]:
    vocab_size, separator, tokenizer, (size, documents, blocks), checksums = read_header(path, version=1)
    parts = {
        "tokens": (token_dtype(vocab_size), size),
        "suffix_array": (np.dtype("<i4"), size),
        "offsets": (np.dtype("<i8"), documents + 1),
        "leads": (np.dtype("<u4"), 4 * blocks),
    }
    arrays, start = {}, HEADER_BYTES
    for (name, (dtype, count)), checksum in zip(parts.items(), checksums, strict=True):
        array = np.fromfile(path, dtype, count, offset=start)
        if len(array) != count or checksum_of(array) != checksum:
            raise StorageError(path, name, "checksum does not match, the file is damaged")
        arrays[name] = array
        start += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    tokens, suffix_array, offsets = (arrays[name] for name in ("tokens", "suffix_array", "offsets"))
    return assemble_segment(tokens, suffix_array, offsets, vocab_size, separator), tokenizer
