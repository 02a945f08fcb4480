"""Write-ahead logs of the live tier, format version 3, and 4 where they are encrypted; docs/storage-format.md describes every byte."""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from datastore_service.engine.live.store import Document
from datastore_service.engine.provenance import PROVENANCE, UNNUMBERED, provenance_of, unnumbered
from datastore_service.engine.segment import token_dtype
from datastore_service.protocol.types import Opening
from datastore_service.storage.atomic import atomic_write, sync_directory
from datastore_service.storage.encryption_keys import UNENCRYPTED, TextKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.file_cipher import HEADER_BYTES as CIPHER_BYTES
from datastore_service.storage.file_cipher import FileCipher, key_of, new_cipher, read_cipher

log = logging.getLogger(__name__)

MAGIC = b"SPECLOG\x00"
VERSION = 3
_UNNAMED_VERSION = 1  # its records do not say whose they are
_UNNUMBERED_VERSION = 2  # nor do these say where they were published
ENCRYPTED_VERSION = 4
_VERSIONS = (_UNNAMED_VERSION, _UNNUMBERED_VERSION, VERSION, ENCRYPTED_VERSION)
LOG_NAME = re.compile(r"(\d{8,})\.log")
_HEADER = struct.Struct("<8sIIQ32s")  # without its own checksum, which follows as u32
_RECORD = struct.Struct("<III")
HEADER_BYTES = 64
_ENCRYPTED_HEADER_BYTES = HEADER_BYTES + CIPHER_BYTES
_NUMBER = struct.Struct("<Q")  # of an encrypted record, and its offset
_PAGE = 4096  # bytes that the system writes at a time


def log_name(number: int) -> str:
    return f"{number:08d}.log"


class LogWriter:
    """Appends documents to one log; the first one creates the file. keys: encrypt it.

    size: bytes of complete records, header included. synced: how many of them would survive a power failure.

    `append` and `sync` may run at the same time, but two calls of one of them may not."""

    def __init__(self, path: Path, tokenizer: str, vocab_size: int, keys: TextKeys = UNENCRYPTED) -> None:
        self._path = path
        self._records = _Records(path, tokenizer, vocab_size, keys)
        self._descriptor: int | None = None
        self._torn = False  # the file may end with part of a record
        self._sync_failed = False
        self._entry_synced = False  # the directory entry of the file
        self.size = 0
        self.synced = 0

    def append(self, tokens: np.ndarray, provenance: np.ndarray) -> None:
        """Writes one record with one system call, so only a full disk or a power failure can tear it. Raises OSError and
        then has added nothing: what is in the file of the record is cut off at once, or by the next append or the reader."""
        data = self._records.formed(self.size, tokens, provenance)
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        if self._torn:
            self._cut()
        self._torn = True
        try:
            if os.write(self._descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            self._cut()  # it may be text that is forgotten before the next append
            raise
        self._torn = False
        self.size += len(data)

    def _cut(self) -> None:
        """Cuts off what there is of a record that was not written whole."""
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, self.size)
        self._torn = False

    def sync(self) -> None:
        """Makes what was appended before the call survive a power failure.

        Raises OSError. Once it has failed it fails always: the system may have dropped the pages that it could not
        write, and would report success at the next try."""
        size = self.size
        if size == self.synced or self._descriptor is None:
            return
        if self._sync_failed:
            raise OSError(errno.EIO, "an earlier sync failed", str(self._path))
        self._sync_failed = True
        os.fsync(self._descriptor)
        if not self._entry_synced:
            sync_directory(self._path.parent)
        self._sync_failed, self._entry_synced = False, True
        self.synced = size

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True, slots=True)
class LogContents:
    """What `read_log` finds in a log.

    torn: bytes of an incomplete record at the end, which were dropped."""

    documents: list[Document]
    torn: int


class _Records:
    """Forms what a log gets next.

    A record that could not be written gets another number when it is formed again: two texts under one would betray both."""

    def __init__(self, path: Path, tokenizer: str, vocab_size: int, keys: TextKeys) -> None:
        self._dtype = _payload_dtype(vocab_size)
        self._cipher = new_cipher(keys, path.name) if keys.newest else None
        self._header = _header(tokenizer, vocab_size, ENCRYPTED_VERSION if self._cipher else VERSION)
        self._header += self._cipher.header if self._cipher else b""
        self._number = 0

    def formed(self, size: int, tokens: np.ndarray, provenance: np.ndarray) -> bytes:
        """A document's record, after the header if the log has none yet. size: bytes of the log."""
        payload = provenance.tobytes() + tokens.astype(self._dtype).tobytes()
        if self._cipher:
            self._number += 1
            place = _NUMBER.pack(size or len(self._header))
            payload = _NUMBER.pack(self._number) + self._cipher.encrypt(self._number, payload, place)
        return (b"" if size else self._header) + _record(payload)


def read_log(path: Path, tokenizer: str, vocab_size: int, keys: TextKeys = UNENCRYPTED) -> LogContents:
    """Reads the documents of a log.

    A killed process or a power failure may leave a torn record at the end: the file ends within it, or its last pages
    are zero. A torn record is dropped. A complete record that does not match its checksum is damaged.

    Documents of a log of version 1 are nobody's, and as old as the log. Raises StorageError naming the offset of a damaged
    record, and for a log of another tokenizer, vocabulary or version. keys: as of `read_cipher`, and it raises what that raises."""
    try:
        data, written = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error
    if _is_torn_header(data, tokenizer, vocab_size):
        return LogContents([], len(data))
    version = _check_header(path, data, tokenizer, vocab_size)
    cipher = (
        read_cipher(path, _cipher_header(data), keys, path.name) if version == ENCRYPTED_VERSION else None
    )
    documents: list[Document] = []
    end = _begin(version)
    for offset, payload in _payloads(path, data, end):
        end = offset + _RECORD.size + len(payload)
        plain = _decrypted(path, offset, payload, cipher) if cipher else payload
        provenance, text = _split(path, offset, plain, version, written)
        documents.append((_tokens(path, offset, text, vocab_size), provenance))
    return LogContents(documents, len(data) - end)


def complete_bytes(path: Path, data: bytes, tokenizer: str, vocab_size: int) -> int:
    """How many bytes of a log are complete records, with what precedes them. Needs no key. Raises StorageError as `read_log`, but looks at
    checksums alone."""
    if _is_torn_header(data, tokenizer, vocab_size):
        return 0
    version = _check_header(path, data, tokenizer, vocab_size)
    if version == ENCRYPTED_VERSION:
        key_of(path, _cipher_header(data))
    end = _begin(version)
    for offset, payload in _payloads(path, data, end):
        end = offset + _RECORD.size + len(payload)
    return end


def log_cipher(path: Path, keys: TextKeys) -> FileCipher | None:
    """The cipher of a log, None for one that is not encrypted or has no record. Raises StorageError as `read_cipher`, OSError."""
    with open(path, "rb") as file:
        data = file.read(_ENCRYPTED_HEADER_BYTES)
    encrypted = data.startswith(MAGIC + struct.pack("<I", ENCRYPTED_VERSION))
    if not encrypted or len(data) < _ENCRYPTED_HEADER_BYTES:
        return None
    return read_cipher(path, _cipher_header(data), keys, path.name)


def rewrite_log(path: Path, tokenizer: str, vocab_size: int, keys: TextKeys) -> None:
    """Replaces a log by one of the newest key with the same documents, atomically and durably. Raises as `read_log`, OSError."""
    records = _Records(path, tokenizer, vocab_size, keys)
    contents = read_log(path, tokenizer, vocab_size, keys)
    warn_of_torn(path, contents)
    with atomic_write(path) as file:
        for tokens, provenance in contents.documents:
            file.write(records.formed(file.tell(), tokens, provenance))


def warn_of_torn(path: Path, contents: LogContents) -> None:
    """Logs a line about an unfinished record that a log has ended with."""
    if contents.torn:
        log.warning("live tier: dropped %d bytes of an unfinished record: %s", contents.torn, path)


def _begin(version: int) -> int:
    """Finds where the first record of a log of that version begins."""
    return _ENCRYPTED_HEADER_BYTES if version == ENCRYPTED_VERSION else HEADER_BYTES


def _cipher_header(data: bytes) -> bytes:
    return data[HEADER_BYTES:_ENCRYPTED_HEADER_BYTES]


def _decrypted(path: Path, offset: int, payload: bytes, cipher: FileCipher) -> bytes:
    if len(payload) < _NUMBER.size:
        raise StorageError(path, f"offset {offset}", f"{len(payload)} bytes, too few for an encrypted record")
    (number,) = _NUMBER.unpack_from(payload)
    return cipher.decrypt(path, offset, number, payload[_NUMBER.size :], _NUMBER.pack(offset))


def _header(tokenizer: str, vocab_size: int, version: int = VERSION) -> bytes:
    width = _payload_dtype(vocab_size).itemsize
    header = _HEADER.pack(MAGIC, version, width, vocab_size, bytes.fromhex(tokenizer))
    return (header + struct.pack("<I", crc32(header))).ljust(HEADER_BYTES, b"\x00")


def _payload_dtype(vocab_size: int) -> np.dtype:
    return token_dtype(vocab_size).newbyteorder("<")


def _record(payload: bytes) -> bytes:
    length = struct.pack("<I", len(payload))
    return _RECORD.pack(len(payload), crc32(length), crc32(payload)) + payload


def _is_torn_header(data: bytes, tokenizer: str, vocab_size: int) -> bool:
    """Whether the first record was never completed: the file has (part of) a header and no more, or only zeros."""
    headers = [_header(tokenizer, vocab_size, version) for version in _VERSIONS]
    within = len(data) < _ENCRYPTED_HEADER_BYTES and data.startswith(headers[-1])
    return not any(data) or within or any(header.startswith(data) for header in headers)


def _check_header(path: Path, data: bytes, tokenizer: str, vocab_size: int) -> int:
    """The version of a log whose header is right."""
    if len(data) < HEADER_BYTES:
        raise StorageError(path, "header", f"{len(data)} bytes that are not the beginning of one")
    magic, version, width, found_vocab, found_tokenizer = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise StorageError(path, "magic", f"{magic!r}, this is not a log")
    if version not in _VERSIONS:
        raise StorageError(
            path,
            "version",
            f"{version}, this program reads 1 to {ENCRYPTED_VERSION}: start the specstore that wrote it",
        )
    (checksum,) = struct.unpack_from("<I", data, _HEADER.size)
    if checksum != crc32(data[: _HEADER.size]) or any(data[_HEADER.size + 4 : HEADER_BYTES]):
        raise StorageError(path, "header", "checksum does not match, the file is damaged")
    if found_tokenizer.hex() != tokenizer:
        raise StorageError(path, "tokenizer", f"written with {found_tokenizer.hex()}, not {tokenizer}")
    if found_vocab != vocab_size or width != _payload_dtype(vocab_size).itemsize:
        raise StorageError(
            path, "vocab_size", f"{found_vocab} in {width} bytes a token, the namespace has {vocab_size}"
        )
    return version


def _payloads(path: Path, data: bytes, offset: int) -> Iterator[tuple[int, bytes]]:
    """The offset and the payload of each complete record from `offset` on."""
    while (payload := _payload(path, data, offset)) is not None:
        yield offset, payload
        offset += _RECORD.size + len(payload)


def _payload(path: Path, data: bytes, offset: int) -> bytes | None:
    """The payload of the record at `offset`. None at the end of the log and for a torn record."""
    begin = offset + _RECORD.size
    if begin > len(data):
        return None
    length, length_checksum, checksum = _RECORD.unpack_from(data, offset)
    if length == 0 or length_checksum != crc32(data[offset : offset + 4]):
        if not any(data[offset:]):  # pages that were added to the file and never written
            return None
        raise StorageError(path, f"offset {offset}", "not a record, the file is damaged")
    end = begin + length
    if end > len(data):
        return None
    payload = data[begin:end]
    if crc32(payload) != checksum:
        if _is_unwritten(data, offset):
            return None
        raise StorageError(path, f"offset {offset}", "checksum does not match, the file is damaged")
    return payload


def _is_unwritten(data: bytes, offset: int) -> bool:
    """Whether the file ends, within the record at `offset`, in pages that were added and never written. A power failure
    leaves that if the file's length reached the disk before its bytes."""
    last_page = (len(data) - 1) // _PAGE * _PAGE
    return last_page > offset and not any(data[last_page:])


def _split(path: Path, offset: int, payload: bytes, version: int, written: float) -> tuple[np.ndarray, bytes]:
    """A record's PROVENANCE [1], and the bytes of its tokens. version: of the log. written: when it was last, in seconds since 1970."""
    if version == _UNNAMED_VERSION:
        return provenance_of(Opening(), written), payload
    size = (UNNUMBERED if version == _UNNUMBERED_VERSION else PROVENANCE).itemsize
    if len(payload) <= size:
        raise StorageError(path, f"offset {offset}", f"{len(payload)} bytes, too few for a document")
    read = unnumbered if version == _UNNUMBERED_VERSION else _numbered
    return read(payload[:size]), payload[size:]


def _numbered(data: bytes) -> np.ndarray:
    return np.frombuffer(data, PROVENANCE)


def _tokens(path: Path, offset: int, payload: bytes, vocab_size: int) -> np.ndarray:
    dtype = _payload_dtype(vocab_size)
    if len(payload) % dtype.itemsize:
        raise StorageError(
            path, f"offset {offset}", f"{len(payload)} bytes are not tokens of {dtype.itemsize}"
        )
    tokens = np.frombuffer(payload, dtype)
    if int(tokens.max()) >= vocab_size:
        raise StorageError(
            path, f"offset {offset}", f"id {int(tokens.max())} is outside the vocabulary of {vocab_size}"
        )
    return tokens.astype(np.int32)
