"""Segment files, format version 2; docs/segment-format.md describes every byte."""

from __future__ import annotations

import os
import struct
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np
from isal.isal_zlib import crc32

from datastore_service.engine.packing import packed_size
from datastore_service.engine.segment import (
    MAX_SIZE,
    PARTS,
    Origin,
    Segment,
    checksum_of,
    suffix_bits,
    token_dtype,
)
from datastore_service.protocol.types import MAX_VOCAB
from datastore_service.storage.encrypted_file import find_encrypted, writing
from datastore_service.storage.encryption_keys import UNENCRYPTED, TextKeys
from datastore_service.storage.errors import StorageError

MAGIC = b"SPECSEG\x00"
VERSION = 2
OLD_VERSIONS = (1,)  # `specstore upgrade` reads them
SUFFIX = ".seg"
_ALIGNMENT = 64
_HEADER = struct.Struct("<8sIIQQ32sQQQ4I")  # without its own checksum, which follows as u32
HEADER_BYTES = 128
DAMAGED = "checksum does not match, the file is damaged"
_CHUNK = 1 << 20


class SegmentFile:
    """An open segment file: header fields as attributes, the arrays mapped read-only. Those of an encrypted file are in memory.

    Opening reads and verifies the header and the file's length, which takes microseconds. `verify` reads the rest. A
    file must be verified before anything is drafted from it or merged from it.
    """

    def __init__(self, path: Path | str, tokenizer: str | None = None, keys: TextKeys = UNENCRYPTED) -> None:
        """Opens a segment file and checks its header and length. Raises StorageError.

        tokenizer: the fingerprint the file must have been built with, None for any. keys: of the file's namespace."""
        self.path = Path(path)
        self._encrypted = find_encrypted(self.path, keys)
        header = self._encrypted.head(HEADER_BYTES) if self._encrypted else _header_bytes(self.path)
        fields = _parsed(self.path, header, VERSION)
        self.vocab_size, self.separator, self.tokenizer, self._sizes, self._checksums = fields
        if tokenizer is not None and tokenizer != self.tokenizer:
            raise StorageError(self.path, "tokenizer", f"built with {self.tokenizer}, not {tokenizer}")
        self._layout, self._end = _layout(self.vocab_size, *self._sizes)
        self._status = self.path.stat()
        self._check_length()

    def __len__(self) -> int:
        """Tokens of all documents."""
        size, documents, _ = self._sizes
        return size - documents

    @cached_property
    def segment(self) -> Segment:
        """Raises StorageError for a file that does not hold what its header says."""
        # One mapping for all parts: each holds a file descriptor.
        whole = self._encrypted.whole() if self._encrypted else np.memmap(self.path, np.uint8, "r")
        tokens, suffixes, offsets, keys = (_part(whole, *part) for part in self._layout)
        size, _, _ = self._sizes
        if offsets[0] != 0 or offsets[-1] != size:
            raise StorageError(self.path, "offsets", f"do not reach from 0 to {size}")
        mapped = 0 if self._encrypted else self._end
        origin = Origin(str(self.path), self._checksums, self._status.st_dev, self._status.st_ino, mapped)
        return Segment(tokens, suffixes, offsets, keys, self.vocab_size, self.separator, origin)

    def verify(self) -> None:
        """Compares every byte after the header with its checksum, and checks the bounds that queries rely on: a checksum says nothing of
        who wrote the file. Raises StorageError naming the part that differs.

        It first reads the file and not the mapping: a read error in a mapping would end the process. What was decrypted is as it was
        written."""
        if not self._encrypted:
            self._verify_content()
        try:
            self.segment.check_bounds()
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            raise StorageError(self.path, field, reason) from None

    def _verify_content(self) -> None:
        try:
            with open(self.path, "rb", buffering=0) as file:
                verify_content(file, self.path)  # type: ignore[arg-type]
        except OSError as error:
            raise StorageError(self.path, "file", error.strerror or str(error)) from error

    def _check_length(self) -> None:
        found = self._encrypted.length if self._encrypted else self._status.st_size
        if found != self._end:
            raise StorageError(self.path, "length", f"{found} bytes, the header says {self._end}")


def verify_content(file: BinaryIO, path: Path) -> None:
    """Compares every byte of an open segment file with its checksums. Raises StorageError naming the part that differs.

    path: what the errors name."""
    file.seek(0)
    vocab_size, _, _, sizes, checksums = _parsed(path, file.read(HEADER_BYTES), VERSION)
    layout, end = _layout(vocab_size, *sizes)
    length = file.seek(0, os.SEEK_END)
    if length != end:
        raise StorageError(path, "length", f"{length} bytes, the header says {end}")
    ends = [start for start, _, _ in layout[1:]] + [end]
    for name, part, end, checksum in zip(PARTS, layout, ends, checksums, strict=True):
        start, dtype, shape = part
        file.seek(start)
        if _read_checksum(file, _nbytes(dtype, shape)) != checksum:
            raise StorageError(path, name, DAMAGED)
        if any(file.read(end - file.tell())):
            raise StorageError(path, f"padding after {name}", "not zero, the file is damaged")


def shortened(segment: Segment) -> bool:
    """Whether the file that the segment is mapped from has lost its end. To read there ends the process (SIGBUS)."""
    origin = segment.origin
    if origin is None:
        return False
    try:
        status = os.stat(origin.path)
    except OSError:  # removed or out of reach: what is mapped stays readable
        return False
    return (status.st_dev, status.st_ino) == (origin.device, origin.inode) and status.st_size < origin.length


def open_verified(path: Path, tokenizer: str, vocab_size: int, keys: TextKeys = UNENCRYPTED) -> SegmentFile:
    """Opens and verifies a file. Raises StorageError for a damaged one and for another tokenizer or vocabulary."""
    file = SegmentFile(path, tokenizer, keys)
    if file.vocab_size != vocab_size:
        raise StorageError(path, "vocab_size", f"{file.vocab_size}, the manifest says {vocab_size}")
    file.verify()
    return file


def _part(whole: np.ndarray, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return whole[start : start + _nbytes(dtype, shape)].view(dtype).reshape(shape)


def _nbytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape, dtype=object))


def _read_checksum(file: BinaryIO, size: int) -> int:
    """CRC-32 of the next `size` bytes of a file, or of those that are left."""
    buffer, checksum = memoryview(bytearray(min(size, _CHUNK))), 0
    while size and (read := file.readinto(buffer[:size])):  # type: ignore[attr-defined]
        checksum = crc32(buffer[:read], checksum)
        size -= read
    return checksum


def write_segment(path: Path | str, segment: Segment, tokenizer: str, keys: TextKeys = UNENCRYPTED) -> None:
    """Writes a segment atomically and durably. tokenizer: fingerprint, 64 hexadecimal digits. keys: encrypt it.

    Raises ValueError for what is no fingerprint, OSError if the disk refuses."""
    if len(tokenizer) != 64:
        raise ValueError(f"tokenizer: a fingerprint has 64 hexadecimal digits, not {len(tokenizer)}")
    sizes = len(segment.tokens), segment.documents, len(segment.keys)
    layout, end = _layout(segment.vocab_size, *sizes)
    arrays = [getattr(segment, name) for name in PARTS]
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        segment.tokens.itemsize,
        segment.vocab_size,
        segment.separator,
        bytes.fromhex(tokenizer),
        *sizes,
        *map(checksum_of, arrays),
    )
    with writing(Path(path), keys, end) as file:
        file.write(header + struct.pack("<I", crc32(header)))
        for (start, dtype, _), array in zip(layout, arrays, strict=True):
            file.write(bytes(start - file.tell()))
            # Not by tofile, whose error does not say why the disk refuses.
            file.write(np.ascontiguousarray(array, dtype).data)
        file.write(bytes(end - file.tell()))


def _layout(
    vocab_size: int, size: int, documents: int, blocks: int
) -> tuple[list[tuple[int, np.dtype, tuple[int, ...]]], int]:
    """Start, dtype and shape of each part, and the file's length."""
    parts, start = [], HEADER_BYTES
    shapes: tuple[tuple[int, ...], ...] = (
        (size,),
        (packed_size(size, suffix_bits(size)),),
        (documents + 1,),
        (blocks,),
    )
    fixed = [np.dtype(kind) for kind in (np.uint8, np.int64, np.uint64)]
    dtypes: list[np.dtype] = [token_dtype(vocab_size), *fixed]
    for dtype, shape in zip(dtypes, shapes, strict=True):
        parts.append((start, dtype.newbyteorder("<"), shape))
        start += -(-_nbytes(dtype, shape) // _ALIGNMENT) * _ALIGNMENT
    return parts, start


def read_header(
    path: Path, version: int = VERSION
) -> tuple[int, int, str, tuple[int, int, int], tuple[int, ...]]:
    """vocab_size, separator, tokenizer, sizes (tokens, documents, keys) and checksums of a file of `version`.

    Raises StorageError for a damaged file and for one that is no segment file."""
    return _parsed(path, _header_bytes(path), version)


def _parsed(
    path: Path, header: bytes, version: int
) -> tuple[int, int, str, tuple[int, int, int], tuple[int, ...]]:
    found = _version(path, header)
    if found != version:
        hint = "; `specstore upgrade` rewrites its directory" if found in OLD_VERSIONS else ""
        raise StorageError(path, "version", f"{found}, this program reads {version}{hint}")
    _, _, width, vocab_size, separator, tokenizer, *rest = _HEADER.unpack_from(header)
    (checksum,) = struct.unpack_from("<I", header, _HEADER.size)
    if checksum != crc32(header[: _HEADER.size]) or any(header[_HEADER.size + 4 :]):
        raise StorageError(path, "header", DAMAGED)
    if not 0 < vocab_size <= MAX_VOCAB or width != token_dtype(vocab_size).itemsize:
        raise StorageError(path, "width", f"{width} bytes a token for a vocabulary of {vocab_size}")
    sizes = tuple(rest[:3])
    if sizes[0] > MAX_SIZE:
        raise StorageError(path, "size", f"{sizes[0]} exceeds {MAX_SIZE}")
    return vocab_size, separator, tokenizer.hex(), sizes, tuple(rest[3:])


def format_version(path: Path) -> int:
    """Raises StorageError for a file that is no segment file."""
    return _version(path, _header_bytes(path))


def _version(path: Path, header: bytes) -> int:
    if len(header) < HEADER_BYTES:
        raise StorageError(path, "length", f"{len(header)} bytes, shorter than the header's {HEADER_BYTES}")
    magic, version, *_ = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise StorageError(path, "magic", f"{magic!r}, this is not a segment file")
    return version


def _header_bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HEADER_BYTES)
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error
