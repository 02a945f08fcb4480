"""Looks for text in the files of a live tier and of its snapshots, whether they count or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datastore_service.engine.live.store import Found
from datastore_service.engine.provenance import NO_PROVENANCE, Selection
from datastore_service.engine.segment import token_dtype
from datastore_service.storage import live_segment, segment_file
from datastore_service.storage.encrypted_file import read_whole
from datastore_service.storage.encryption_keys import TextKeys
from datastore_service.storage.file_cipher import is_encrypted
from datastore_service.storage.live_manifest import LiveManifest
from datastore_service.storage.log import LOG_NAME, log_cipher, read_log

SHORTEST = 32  # bytes of a text that is looked for: fewer occur in any file
_WIDTH = 16
_CHUNK = 1 << 20
_TABLE_BITS = 22


def search(
    folders: Iterable[Path],
    manifest: LiveManifest,
    keys: TextKeys,
    wanted: Selection,
    texts: Sequence[np.ndarray],
) -> Found:
    """Reads every file below the folders, and what encrypted ones hold. Raises StorageError for one that cannot be understood, OSError.

    wanted: which documents are counted. texts: int32, looked for as the bytes that a file has of them."""
    dtype = _stored(manifest)
    patterns = {pattern for text in texts if len(pattern := text.astype(dtype).tobytes()) >= SHORTEST}
    finder, found = Finder(patterns), set[bytes]()
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    nbytes = documents = 0
    for path in files:
        data = path.read_bytes()
        nbytes += len(data)
        content = _content(path, data, manifest, keys)
        found |= finder.found_in(data) | finder.found_in(content.decrypted)
        documents += int(wanted(content.provenance).sum())
    return Found(len(files), nbytes, documents, len(patterns), len(found))


class Finder:
    """Finds many patterns, of at least SHORTEST bytes, in one pass: at each byte it looks up the next sixteen among the middles of all patterns. A table says of most
    places that there is none."""

    def __init__(self, patterns: Iterable[bytes]) -> None:
        self._of: dict[bytes, list[bytes]] = {}
        for pattern in patterns:
            self._of.setdefault(_middle(pattern), []).append(pattern)
        self._likely = np.zeros(1 << _TABLE_BITS, bool)
        for middle in self._of:
            self._likely[_hashes(middle, 0, 1)] = True

    def found_in(self, data: bytes) -> set[bytes]:
        """The patterns that some place of the data has."""
        found: set[bytes] = set()
        for start in range(0, len(data) - _WIDTH + 1 if self._of else 0, _CHUNK):
            size = min(_CHUNK, len(data) - _WIDTH + 1 - start)
            for at in (start + np.flatnonzero(self._likely[_hashes(data, start, size)])).tolist():
                patterns = self._of.get(data[at : at + _WIDTH], ())
                found |= {pattern for pattern in patterns if _is_at(pattern, data, at)}
        return found


def _hashes(data: bytes, start: int, size: int) -> np.ndarray:
    """uint64 [size], a hash of the next _WIDTH bytes at each byte."""
    first, second = _words(data, start, size), _words(data, start + 8, size)
    mixed = first * np.uint64(0x9E3779B97F4A7C15) + second * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.right_shift(mixed, np.uint64(64 - _TABLE_BITS))


def _words(data: bytes, start: int, size: int) -> np.ndarray:
    """uint64 [size], the next eight bytes at each byte, as a view."""
    return np.ndarray((size,), np.uint64, data, start, strides=(1,))


def _middle(pattern: bytes) -> bytes:
    return pattern[len(pattern) // 2 :][:_WIDTH]


def _is_at(pattern: bytes, data: bytes, middle: int) -> bool:
    start = middle - len(pattern) // 2
    return start >= 0 and data.startswith(pattern, start)


class _Content(NamedTuple):
    """What a file says of documents, PROVENANCE, and what of it only a key shows."""

    provenance: np.ndarray = NO_PROVENANCE
    decrypted: bytes = b""


def _content(path: Path, data: bytes, manifest: LiveManifest, keys: TextKeys) -> _Content:
    if path.suffix == live_segment.SUFFIX:
        return _Content(live_segment.read_provenance(path, keys))
    if path.suffix == segment_file.SUFFIX and is_encrypted(data):
        return _Content(decrypted=read_whole(path, keys))
    if not LOG_NAME.fullmatch(path.name):
        return _Content()
    documents = read_log(path, manifest.tokenizer, manifest.vocab_size, keys).documents
    provenance = np.concatenate([NO_PROVENANCE, *(whose for _, whose in documents)])
    if not log_cipher(path, keys):
        return _Content(provenance)
    dtype = _stored(manifest)
    records = (whose.tobytes() + tokens.astype(dtype).tobytes() for tokens, whose in documents)
    return _Content(provenance, b"".join(records))


def _stored(manifest: LiveManifest) -> np.dtype:
    return token_dtype(manifest.vocab_size).newbyteorder("<")
