"""A segment: immutable text with its suffix array.

Layout. One token array holds all documents. A *separator*, a value that no query contains, follows each document. It
makes three checks unnecessary in the hot loops: a comparison ends at a separator at the latest, so it runs neither past
the array nor into the next document, and a continuation stops at a separator.

The suffix array lists all positions in the order of the text that follows them, packed in as many bits as a position
needs. Every `BLOCK`-th row has a *key*: the first tokens of its suffix in one 64-bit number, so that keys are ordered as
the texts are. A search compares numbers in the key table, which has an eighth of the text's size, and then the rows of
one block. Without keys it would read log2(n) random places of the suffix array and of the text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from isal.isal_zlib import crc32
from numba import njit

from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, load_token, view_i32
from datastore_service.engine.packing import bits_for, pack, packed_size, unpack
from datastore_service.engine.provenance import NO_PROVENANCE
from datastore_service.engine.suffix_sorting import sort_suffixes
from datastore_service.protocol.types import MAX_VOCAB

log = logging.getLogger(__name__)

BLOCK = 16
MAX_KEY_TOKENS = 8
MAX_SIZE = (1 << 31) - 2
PARTS = ("tokens", "suffixes", "offsets", "keys")  # of a segment, each an array
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a segment is mapped from, or was decrypted from. checksums: CRC-32 of each of PARTS when the file was written. device,
    inode, length: of the file when it was mapped; another one may have got its name since. length: 0 if it is not mapped."""

    path: str
    checksums: tuple[int, ...]
    device: int
    inode: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Documents that can be searched. Every array is read-only and C-contiguous.

    tokens: uint8, uint16 or uint32 [size], the documents with a separator after each.
    suffixes: uint8, packed (see `packing`); positions of `tokens` in lexicographic order of the text that starts there.
    offsets: int64 [documents + 1], where each document starts; document i ends before offsets[i + 1] - 1.
    keys: uint64 [ceil(size / BLOCK)], the first `key_tokens` tokens of every BLOCK-th suffix, with `key_bits` each, the
    first token in the highest bits, zeros past the end.
    separator: the value after each document. If the vocabulary uses all values of the token width (65,536 ids in two
    bytes), it is the segment's rarest id, which then is stored but never matched or proposed.
    origin: None for a segment in memory alone.
    provenance: of each document (see `provenance`); empty for a segment of a prior.
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray
    vocab_size: int
    separator: int
    origin: Origin | None = None
    provenance: np.ndarray = field(default_factory=lambda: NO_PROVENANCE)

    def __len__(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens) - self.documents

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        arrays = self.tokens, self.suffixes, self.offsets, self.keys, self.provenance
        return sum(array.nbytes for array in arrays)

    @property
    def suffix_bits(self) -> int:
        return suffix_bits(len(self.tokens))

    @property
    def key_bits(self) -> int:
        return bits_for(max(self.vocab_size - 1, self.separator))

    def suffix_array(self) -> np.ndarray:
        """int32 [size], the suffix array unpacked."""
        return unpack(self.suffixes, self.suffix_bits, len(self.tokens))

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1] - 1]

    def chosen(self, which: np.ndarray) -> Iterator[np.ndarray]:
        """Some of the documents, as views. which: bool [documents]."""
        return map(self.document, np.flatnonzero(which).tolist())

    def descriptor(self) -> np.ndarray:
        """int64 [8] for kernels: token address, width, separator, suffix address and bits, rows, key address and bits. Valid
        while the segment lives."""
        tokens, suffixes, keys = map(address_of, (self.tokens, self.suffixes, self.keys))
        return np.array(
            [
                tokens, self.tokens.itemsize, self.separator, suffixes, self.suffix_bits, len(self.tokens), keys,
                self.key_bits,
            ],
            dtype=np.int64,
        )  # fmt: skip

    def damage(self) -> str:
        """A description of the first part that differs from its checksum, "" if none does. Reads the whole segment."""
        if self.origin is not None:
            for part, checksum in zip(PARTS, self.origin.checksums, strict=True):
                if checksum_of(getattr(self, part)) != checksum:
                    return f"{self.origin.path}: {part}: checksum does not match, the file is damaged"
        return ""

    def check_bounds(self) -> None:
        """Raises ValueError naming the first part that would let a query read past the text or draft an id that no model has. Reads
        the text once."""
        _check_shape(self)
        if self.separator > self.vocab_size:
            raise ValueError(f"separator: {self.separator} is above {self.vocab_size}")
        if (self.tokens[self.offsets[1:] - 1] != self.separator).any():
            raise ValueError("tokens: a document does not end with the separator")
        largest = int(self.tokens.max()) if len(self.tokens) else 0
        if largest >= self.vocab_size and largest != self.separator:
            raise ValueError(f"tokens: id {largest} outside the vocabulary of {self.vocab_size}")

    def check_integrity(self) -> None:
        """Raises ValueError naming the first invariant that does not hold. Takes linear time, longer for long repeats."""
        self.check_bounds()
        size = len(self.tokens)
        suffix_array = self.suffix_array()
        if (np.bincount(suffix_array, minlength=size) != 1).any():
            raise ValueError("suffixes: not a permutation of the positions")
        row = _first_unordered(*_addressed(self.tokens, suffix_array))
        if row >= 0:
            raise ValueError(f"suffixes: rows {row} and {row + 1} are out of order")
        if not np.array_equal(self.keys, _key_table(self.tokens, suffix_array, self.key_bits)):
            raise ValueError("keys: not the first tokens of every block's suffix")


def damaged(segments: Iterable[Segment]) -> set[Segment]:
    """The segments whose files have changed since they were written. Logs a line for each."""
    found = {segment: reason for segment in segments if (reason := segment.damage())}
    for reason in found.values():
        log.error("segment taken out: %s", reason)
    return set(found)


def checksum_of(array: np.ndarray) -> int:
    """CRC-32 of an array's bytes, read in chunks because the array may be larger than memory."""
    data = np.ascontiguousarray(array).data.cast("B") if array.size else b""
    value = 0
    for start in range(0, len(data), _CHUNK):
        value = crc32(data[start : start + _CHUNK], value)
    return value


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest unsigned type for the ids and, if it fits, a separator."""
    if vocab_size <= 255:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def build_segment(documents: Iterable[np.ndarray], vocab_size: int, threads: int = 1) -> Segment:
    """Builds a segment of documents, 1-D integer arrays of token ids. threads: see sort_suffixes.

    Raises ValueError for a vocabulary outside 1..2^31, an id outside [0, vocab_size), or more text than fits.
    """
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size: {vocab_size} is outside 1..{MAX_VOCAB}")
    parts = [checked_document(document, vocab_size) for document in documents]
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) + 1 for part in parts], out=offsets[1:])
    if offsets[-1] > MAX_SIZE:
        raise ValueError(f"documents: {offsets[-1]} tokens exceed a segment's {MAX_SIZE}")
    tokens = np.zeros(offsets[-1], dtype=token_dtype(vocab_size))
    for part, start in zip(parts, offsets[:-1], strict=True):
        tokens[start : start + len(part)] = part
    separator = _choose_separator(tokens, offsets, vocab_size)
    tokens[offsets[1:] - 1] = separator
    return assemble_segment(tokens, sort_suffixes(tokens, threads), offsets, vocab_size, separator)


def assemble_segment(
    tokens: np.ndarray, suffix_array: np.ndarray, offsets: np.ndarray, vocab_size: int, separator: int
) -> Segment:
    """A segment of text that is already sorted. suffix_array: int32. The other arguments are Segment's."""
    keys = _key_table(tokens, suffix_array, bits_for(max(vocab_size - 1, separator)))
    suffixes = pack(suffix_array, suffix_bits(len(tokens)))
    for array in (tokens, suffixes, offsets, keys):
        array.flags.writeable = False
    return Segment(tokens, suffixes, offsets, keys, vocab_size, separator)


def part_of(segment: Segment, which: np.ndarray) -> Segment:
    """A segment of some of the documents, with their provenance. which: bool [documents]."""
    built = build_segment(segment.chosen(which), segment.vocab_size)
    return replace(built, provenance=segment.provenance[which])


def suffix_bits(size: int) -> int:
    """Bits of one packed position in a text of `size` tokens."""
    return bits_for(max(0, size - 1))


def checked_document(document: np.ndarray, vocab_size: int) -> np.ndarray:
    """The document as an array; raises ValueError naming the id that is out of range."""
    array = np.asarray(document)
    if array.ndim != 1:
        raise ValueError(f"tokens: a document has {array.ndim} dimensions, not 1")
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens: {array.dtype} is not an integer type")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"tokens: id {low if low < 0 else high} is outside [0, {vocab_size})")
    return array


def _choose_separator(tokens: np.ndarray, offsets: np.ndarray, vocab_size: int) -> int:
    if vocab_size <= np.iinfo(tokens.dtype).max:
        return vocab_size
    counts = np.bincount(tokens, minlength=vocab_size)
    counts[0] -= len(offsets) - 1  # the places of the separators are still 0
    return int(counts.argmin())


def _key_table(tokens: np.ndarray, suffix_array: np.ndarray, key_bits: int) -> np.ndarray:
    """uint64 [blocks], see Segment."""
    keys = np.zeros(-(-len(tokens) // BLOCK), dtype=np.uint64)
    _fill_keys(*_addressed(tokens, suffix_array), key_bits, keys)
    return keys


@njit(inline="always")
def key_tokens(key_bits):
    """The number of tokens in a key, with `key_bits` each."""
    return min(MAX_KEY_TOKENS, 64 // key_bits)


def _addressed(tokens: np.ndarray, suffix_array: np.ndarray) -> tuple[int, int, int, int]:
    """For kernels: token address and width, suffix array address, and the size of both."""
    if not (tokens.flags.c_contiguous and suffix_array.flags.c_contiguous):
        raise ValueError("tokens, suffix_array: not contiguous")
    return address_of(tokens), tokens.itemsize, address_of(suffix_array), len(tokens)


@kernel
def _fill_keys(tokens, width, suffixes, size, key_bits, keys):
    suffix_array = view_i32(suffixes, size)
    for block in range(len(keys)):
        start = np.int64(suffix_array[block * BLOCK])
        key = np.uint64(0)
        for i in range(start, start + key_tokens(key_bits)):
            token = load_token(tokens, width, i) if i < size else np.int64(0)
            key = (key << np.uint64(key_bits)) | np.uint64(token)
        keys[block] = key


@kernel
def _first_unordered(tokens, width, suffixes, size):
    """The first row whose suffix is not smaller than the next row's, or -1. Arguments: see _addressed."""
    suffix_array = view_i32(suffixes, size)
    for row in range(size - 1):
        a, b = np.int64(suffix_array[row]), np.int64(suffix_array[row + 1])
        while b < size and a < size and load_token(tokens, width, a) == load_token(tokens, width, b):
            a += 1
            b += 1
        if b == size or (a < size and load_token(tokens, width, a) > load_token(tokens, width, b)):
            return row
    return -1


def _check_shape(segment: Segment) -> None:
    size = len(segment.tokens)
    if segment.tokens.dtype != token_dtype(segment.vocab_size):
        raise ValueError(f"tokens: {segment.tokens.dtype} does not fit a vocabulary of {segment.vocab_size}")
    if segment.suffixes.dtype != np.uint8 or len(segment.suffixes) != packed_size(size, segment.suffix_bits):
        raise ValueError(f"suffixes: not {segment.suffix_bits} bits for each of {size} positions")
    offsets = segment.offsets
    if offsets.dtype != np.int64 or offsets[0] != 0 or offsets[-1] != size or (np.diff(offsets) < 1).any():
        raise ValueError(f"offsets: not int64 rising from 0 to {size}")
    if segment.keys.dtype != np.uint64 or len(segment.keys) != -(-size // BLOCK):
        raise ValueError(f"keys: not one uint64 for each {BLOCK} positions")
