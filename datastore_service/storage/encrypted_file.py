"""Whole files that are encrypted, or not, as their namespace's keys say: segments and their provenance.

An encrypted file is a header and parts, each with a checksum of its own: who has no key can see that nothing is damaged, and copy it.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from isal.isal_zlib import crc32

from datastore_service.storage.atomic import atomic_write
from datastore_service.storage.encryption_keys import TextKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.file_cipher import (
    HEADER_BYTES,
    TAG_BYTES,
    FileCipher,
    is_encrypted,
    key_of,
    length_of,
    new_cipher,
    read_cipher,
)

PART = 1 << 20  # bytes that are encrypted together; the last part of a file may have fewer
_CHECKSUM = struct.Struct("<I")
_ADDED = _CHECKSUM.size + TAG_BYTES


class EncryptedFile:
    """A file that is encrypted. length: bytes of what it holds. key: its name.

    Raises StorageError as `read_cipher`, and for a file of another length."""

    def __init__(self, path: Path, keys: TextKeys) -> None:
        self._path = path
        with _reading(path) as file:
            self._cipher = read_cipher(path, file.read(HEADER_BYTES), keys, path.suffix)
            self.key, self.length = self._cipher.key, self._cipher.length
            _check_length(path, file, self.length)

    def head(self, size: int) -> bytes:
        """The first bytes, at most PART of them. Raises StorageError for a part that was changed."""
        with _reading(self._path) as file:
            return next(self._parts(file))[:size]

    def whole(self) -> np.ndarray:
        """All of it, uint8, read-only, in memory. Raises StorageError for a part that was changed."""
        whole, end = np.empty(self.length, np.uint8), 0
        with _reading(self._path) as file:
            for part in self._parts(file):
                whole[end : end + len(part)] = np.frombuffer(part, np.uint8)
                end += len(part)
        whole.flags.writeable = False
        return whole

    def _parts(self, file: BinaryIO) -> Iterator[bytes]:
        for number, (offset, part) in enumerate(_stored_parts(self._path, file, self.length), 1):
            yield self._cipher.decrypt(self._path, offset, number, part)


class _Encrypting:
    """What a file of `cipher.length` bytes is written through."""

    def __init__(self, file: BinaryIO, cipher: FileCipher) -> None:
        self._file, self._cipher = file, cipher
        self._pending = bytearray()
        self._number = self._size = 0
        file.write(cipher.header)

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> None:
        """Encrypts what comes next. data: a C-contiguous buffer."""
        left = memoryview(data)
        left = left.cast("B") if left.nbytes else memoryview(b"")
        self._size += len(left)
        while len(left):
            taken = left[: PART - len(self._pending)]
            self._pending += taken
            left = left[len(taken) :]
            if len(self._pending) == PART:
                self._write_part()

    def finish(self) -> None:
        """Writes what is left. Raises ValueError if that is another length than the header says."""
        if self._pending:
            self._write_part()
        if self._size != self._cipher.length:
            raise ValueError(f"length: {self._size} bytes written, the header says {self._cipher.length}")

    def _write_part(self) -> None:
        self._number += 1
        part = self._cipher.encrypt(self._number, self._pending)
        self._file.write(_CHECKSUM.pack(crc32(part)) + part)
        self._pending.clear()


def find_encrypted(path: Path, keys: TextKeys) -> EncryptedFile | None:
    """The file, None for one that is not encrypted. Raises StorageError as `EncryptedFile`."""
    with _reading(path) as file:
        encrypted = is_encrypted(file.read(HEADER_BYTES))
    return EncryptedFile(path, keys) if encrypted else None


def read_whole(path: Path, keys: TextKeys) -> bytes:
    """What a file holds, whether it is encrypted or not. Raises StorageError."""
    if encrypted := find_encrypted(path, keys):
        return encrypted.whole().tobytes()
    with _reading(path) as file:
        return file.read()


@contextmanager
def writing(path: Path, keys: TextKeys, length: int, modified: int | None = None) -> Iterator[Any]:
    """Opens a file to write `length` bytes to, as `atomic_write` does; with keys it is encrypted. modified: nanoseconds since 1970, the file's
    time; None for now."""
    with atomic_write(path) as file:
        target = _Encrypting(file, new_cipher(keys, path.suffix, length)) if keys.newest else file
        yield target
        if isinstance(target, _Encrypting):
            target.finish()
        if modified is not None:
            file.flush()
            os.utime(file.fileno(), ns=(modified, modified))


def verify_encrypted(file: BinaryIO, path: Path) -> None:
    """Compares every part of an open file with its checksum; needs no key. Raises StorageError naming the part's offset. path: what the errors
    name."""
    file.seek(0)
    header = file.read(HEADER_BYTES)
    key_of(path, header)
    _check_length(path, file, length_of(header))
    deque(_stored_parts(path, file, length_of(header)), maxlen=0)


@contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error


def _stored_parts(path: Path, file: BinaryIO, length: int) -> Iterator[tuple[int, bytes]]:
    """Each part as it is stored, and its offset. Raises StorageError for one that does not match its checksum."""
    file.seek(HEADER_BYTES)
    for start in range(0, length, PART):
        offset = file.tell()
        data = file.read(_ADDED + min(PART, length - start))
        part = data[_CHECKSUM.size :]
        if data[: _CHECKSUM.size] != _CHECKSUM.pack(crc32(part)):
            raise StorageError(path, f"offset {offset}", "checksum does not match, the file is damaged")
        yield offset, part


def _check_length(path: Path, file: BinaryIO, length: int) -> None:
    size, parts = file.seek(0, os.SEEK_END), -(-length // PART)
    expected = HEADER_BYTES + length + parts * _ADDED
    if size != expected:
        raise StorageError(path, "length", f"{size} bytes, the header says {expected}")
