"""Segment files, format version 2; docs/segment-format.md describes every byte."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from datastore_service.engine.packing import packed_size
from datastore_service.engine.segment import MAX_SIZE, MAX_VOCAB, Segment, suffix_bits, token_dtype
from datastore_service.storage.atomic import replacing
from datastore_service.storage.errors import StorageError

MAGIC = b"SPECSEG\x00"
VERSION = 2
OLDER = (1,)  # what `specstore upgrade` reads
SUFFIX = ".seg"
_ALIGNMENT = 64
_HEADER = struct.Struct("<8sIIQQ32sQQQ4I")  # without its own checksum, which follows as u32
HEADER_BYTES = 128
_PARTS = ("tokens", "suffixes", "offsets", "keys")
_CHUNK = 1 << 24


class SegmentFile:
    """An open segment file: header fields as attributes, the arrays mapped read-only.

    Opening reads and verifies the header and the file's length, which takes microseconds and touches no page of the
    body, so a prior larger than memory opens at once and two processes share its pages. The body's checksums need all
    of it to be read: `verify` does that, and `specstore build` and anyone who doubts the disk calls it.
    """

    def __init__(self, path: Path | str, tokenizer: str | None = None) -> None:
        """tokenizer: the fingerprint the file must have been built with, None for any. Raises StorageError."""
        self.path = Path(path)
        fields = read_header(self.path)
        self.vocab_size, self.separator, self.tokenizer, self._sizes, self._checksums = fields
        if tokenizer is not None and tokenizer != self.tokenizer:
            raise StorageError(self.path, "tokenizer", f"built with {self.tokenizer}, not {tokenizer}")
        self.segment = self._map()

    def verify(self) -> None:
        """Compares the body with its checksums. Raises StorageError naming the part that differs."""
        for name, checksum in zip(_PARTS, self._checksums, strict=True):
            if body_checksum(getattr(self.segment, name)) != checksum:
                raise StorageError(self.path, name, "checksum does not match, the file is damaged")

    def _map(self) -> Segment:
        size, documents, blocks = self._sizes
        layout, end = _layout(self.vocab_size, size, documents, blocks)
        actual = self.path.stat().st_size
        if actual != end:
            raise StorageError(self.path, "length", f"{actual} bytes, the header says {end}")
        whole = np.memmap(self.path, dtype=np.uint8, mode="r")  # holds a descriptor, so one for all parts
        tokens, suffixes, offsets, keys = (_part(whole, *part) for part in layout)
        if offsets[0] != 0 or offsets[-1] != size:
            raise StorageError(self.path, "offsets", f"do not reach from 0 to {size}")
        return Segment(tokens, suffixes, offsets, keys, self.vocab_size, self.separator)


def _part(whole: np.ndarray, start: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
    return whole[start : start + nbytes].view(dtype).reshape(shape)


def write_segment(path: Path | str, segment: Segment, tokenizer: str) -> None:
    """Writes a segment atomically and durably. tokenizer: fingerprint, 64 hexadecimal digits.

    Raises ValueError for another fingerprint and OSError where the disk refuses."""
    if len(tokenizer) != 64:
        raise ValueError(f"tokenizer: a fingerprint has 64 hexadecimal digits, not {len(tokenizer)}")
    sizes = len(segment.tokens), segment.documents, len(segment.keys)
    layout, end = _layout(segment.vocab_size, *sizes)
    arrays = [getattr(segment, name) for name in _PARTS]
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        segment.tokens.itemsize,
        segment.vocab_size,
        segment.separator,
        bytes.fromhex(tokenizer),
        *sizes,
        *map(body_checksum, arrays),
    )
    with replacing(Path(path)) as file:
        file.write(header + struct.pack("<I", zlib.crc32(header)))
        for (start, dtype, _), array in zip(layout, arrays, strict=True):
            file.write(bytes(start - file.tell()))
            array.astype(dtype, copy=False).tofile(file)
            file.seek(0, 2)  # tofile writes past Python's own position
        file.write(bytes(end - file.tell()))


def _layout(
    vocab_size: int, size: int, documents: int, blocks: int
) -> tuple[list[tuple[int, np.dtype, tuple[int, ...]]], int]:
    """Start, type and shape of every part, and the file's length."""
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
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
        start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return parts, start


def read_header(
    path: Path, version: int = VERSION
) -> tuple[int, int, str, tuple[int, int, int], tuple[int, ...]]:
    """vocab_size, separator, tokenizer, sizes (tokens, documents, keys) and checksums of a file of `version`.

    Raises StorageError for a file that is none or damaged."""
    found = format_version(path)
    if found != version:
        hint = "; `specstore upgrade` rewrites its directory" if found in OLDER else ""
        raise StorageError(path, "version", f"{found}, this program reads {version}{hint}")
    header = _header_bytes(path)
    _, _, width, vocab_size, separator, tokenizer, *rest = _HEADER.unpack_from(header)
    (checksum,) = struct.unpack_from("<I", header, _HEADER.size)
    if checksum != zlib.crc32(header[: _HEADER.size]) or any(header[_HEADER.size + 4 :]):
        raise StorageError(path, "header", "checksum does not match, the file is damaged")
    if not 0 < vocab_size <= MAX_VOCAB or width != token_dtype(vocab_size).itemsize:
        raise StorageError(path, "width", f"{width} bytes a token for a vocabulary of {vocab_size}")
    sizes = tuple(rest[:3])
    if sizes[0] > MAX_SIZE:
        raise StorageError(path, "size", f"{sizes[0]} exceeds {MAX_SIZE}")
    return vocab_size, separator, tokenizer.hex(), sizes, tuple(rest[3:])


def format_version(path: Path) -> int:
    """Raises StorageError for a file that is no segment file."""
    magic, version, *_ = _HEADER.unpack_from(_header_bytes(path))
    if magic != MAGIC:
        raise StorageError(path, "magic", f"{magic!r}, this is not a segment file")
    return version


def _header_bytes(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error
    if len(header) < HEADER_BYTES:
        raise StorageError(path, "length", f"{len(header)} bytes, shorter than the header's {HEADER_BYTES}")
    return header


def body_checksum(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes, in chunks: the body may be larger than memory."""
    data = np.ascontiguousarray(array).data.cast("B") if array.size else b""
    value = 0
    for start in range(0, len(data), _CHUNK):
        value = zlib.crc32(data[start : start + _CHUNK], value)
    return value
