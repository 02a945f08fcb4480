"""A segment: immutable text with its suffix array.

Layout. The documents stand one after the other in one token array, each followed by a *separator*, a value that no
query contains. It makes three checks unnecessary in the hot loops: a comparison always ends at a separator at the
latest, so it neither runs past the array nor into the next document, and a continuation stops where it meets one.

The suffix array lists all positions in the order of the text that follows them. Every `BLOCK`-th row's first
`LEAD` tokens are repeated in a small *lead table* that stays in the cache: a search touches the table first and then
only the rows of one block, instead of log2(n) random places of the suffix array and of the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from pydivsufsort import divsufsort

from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, load_token, view_i32, view_i64

BLOCK = 64
LEAD = 4
MAX_VOCAB = 1 << 31
MAX_SIZE = (1 << 31) - 2


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Documents that can be searched; every array is read-only and C-contiguous.

    tokens: uint8, uint16 or uint32 [size], the documents with a separator after each.
    suffix_array: int32 [size], positions of `tokens` in lexicographic order of their suffixes.
    offsets: int64 [documents + 1], where each document starts; document i ends before offsets[i + 1] - 1.
    leads: uint32 [ceil(size / BLOCK), LEAD], the first tokens of every BLOCK-th suffix.
    separator: the value after each document. Where the vocabulary leaves no unused value of the token width (65,536
    ids in two bytes), it is the segment's rarest id, which then is stored but never matched or proposed.
    """

    tokens: np.ndarray
    suffix_array: np.ndarray
    offsets: np.ndarray
    leads: np.ndarray
    vocab_size: int
    separator: int

    def __len__(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens) - self.documents

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.suffix_array.nbytes + self.offsets.nbytes + self.leads.nbytes

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document, a view."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1] - 1]

    def descriptor(self) -> np.ndarray:
        """int64 [6]: what kernels need (token address, width, separator, suffix array address, rows, lead address).
        Valid while the segment lives."""
        addresses = address_of(self.tokens), address_of(self.suffix_array), address_of(self.leads)
        width = self.tokens.itemsize
        row = (addresses[0], width, self.separator, addresses[1], len(self.tokens), addresses[2])
        return np.array(row, dtype=np.int64)

    def check_integrity(self) -> None:
        """Raises ValueError naming the first invariant that does not hold. Linear in the size, up to long repeats."""
        _check_shape(self)
        size = len(self.tokens)
        ends = self.offsets[1:] - 1
        if (self.tokens[ends] != self.separator).any():
            raise ValueError("tokens: a document does not end with the separator")
        inner = np.delete(self.tokens, ends)
        if len(inner) and int(inner.max()) >= self.vocab_size:
            raise ValueError(f"tokens: id {int(inner.max())} outside the vocabulary of {self.vocab_size}")
        if (np.bincount(self.suffix_array, minlength=size) != 1).any():
            raise ValueError("suffix_array: not a permutation of the positions")
        row = _first_unordered(*_addressed(self.tokens, self.suffix_array))
        if row >= 0:
            raise ValueError(f"suffix_array: rows {row} and {row + 1} are out of order")
        if not np.array_equal(self.leads, _lead_table(self.tokens, self.suffix_array)):
            raise ValueError("leads: not the first tokens of every block's suffix")


def token_dtype(vocab_size: int) -> np.dtype:
    """Narrowest unsigned type for the ids and, where it fits, a separator."""
    if vocab_size <= 255:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def build_segment(documents: Iterable[np.ndarray], vocab_size: int) -> Segment:
    """Concatenates and sorts documents (1-D integer arrays of token ids).

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
    suffix_array = _sort_suffixes(tokens)
    leads = _lead_table(tokens, suffix_array)
    for array in (tokens, suffix_array, offsets, leads):
        array.flags.writeable = False
    return Segment(tokens, suffix_array, offsets, leads, vocab_size=vocab_size, separator=separator)


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
    counts[0] -= len(offsets) - 1  # the places kept free for separators
    return int(counts.argmin())


def _sort_suffixes(tokens: np.ndarray) -> np.ndarray:
    """int32 suffix array of a token array.

    pydivsufsort sorts bytes: given integers it spells each with 1, 2 or 4 bytes, sorts all byte suffixes and keeps
    those that start a token. The cost is the number of bytes, so ids are first replaced by their rank among the ids
    that occur (the order, and with it the suffix array, stays the same) and spelled with as few bytes as ranks need.
    """
    if len(tokens) == 0:
        return np.empty(0, dtype=np.int32)
    ranks, distinct = _ranks(tokens)
    width = max(1, ((distinct - 1).bit_length() + 7) // 8)
    spelled = np.empty((len(tokens), width), dtype=np.uint8)
    _spell(ranks, spelled)
    suffixes = divsufsort(spelled.reshape(-1))
    if width == 1:
        return suffixes.astype(np.int32, copy=False)
    return _token_suffixes(address_of(suffixes), suffixes.itemsize, len(suffixes), width, len(tokens))


def _ranks(tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """uint32, each token's rank among the distinct tokens, and how many there are."""
    span = int(tokens.max()) + 1
    if span > max(1 << 20, 2 * len(tokens)):  # a table by id would outweigh the text
        distinct, ranks = np.unique(tokens, return_inverse=True)
        return ranks.astype(np.uint32), len(distinct)
    present = np.zeros(span, dtype=np.uint32)
    present[tokens] = 1
    table = np.cumsum(present, dtype=np.uint32)
    return (table - present)[tokens], int(table[-1])


@kernel
def _spell(ranks, spelled):
    size, width = spelled.shape
    for i in range(size):
        rest = ranks[i]
        for place in range(width - 1, -1, -1):
            spelled[i, place] = rest & 255
            rest >>= 8


@kernel
def _token_suffixes(address, itemsize, count, width, size):
    """The rows of `count` byte suffixes (int32 or int64 at `address`) that start a token."""
    rows = np.empty(size, dtype=np.int32)
    row = 0
    for i in range(count):
        position = np.int64(view_i32(address, count)[i]) if itemsize == 4 else view_i64(address, count)[i]
        token = position // width
        if token * width == position:
            rows[row] = token
            row += 1
    return rows


def _lead_table(tokens: np.ndarray, suffix_array: np.ndarray) -> np.ndarray:
    """uint32 [blocks, LEAD], see Segment."""
    leads = np.zeros((-(-len(tokens) // BLOCK), LEAD), dtype=np.uint32)
    _fill_leads(*_addressed(tokens, suffix_array), leads)
    return leads


def _addressed(tokens: np.ndarray, suffix_array: np.ndarray) -> tuple[int, int, int, int]:
    """For kernels: token address and width, suffix array address, and the size of both."""
    if not (tokens.flags.c_contiguous and suffix_array.flags.c_contiguous):
        raise ValueError("tokens, suffix_array: not contiguous")
    return address_of(tokens), tokens.itemsize, address_of(suffix_array), len(tokens)


@kernel
def _fill_leads(tokens, width, suffixes, size, leads):
    suffix_array = view_i32(suffixes, size)
    for block in range(len(leads)):
        start = np.int64(suffix_array[block * BLOCK])
        for i in range(min(LEAD, size - start)):
            leads[block, i] = load_token(tokens, width, start + i)


@kernel
def _first_unordered(tokens, width, suffixes, size):
    """First row whose suffix is not smaller than the next row's, or -1. Arguments: see _addressed."""
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
    if segment.suffix_array.dtype != np.int32 or len(segment.suffix_array) != size:
        raise ValueError(f"suffix_array: not int32 [{size}]")
    offsets = segment.offsets
    if offsets.dtype != np.int64 or offsets[0] != 0 or offsets[-1] != size or (np.diff(offsets) < 1).any():
        raise ValueError(f"offsets: not int64 rising from 0 to {size}")
    if segment.leads.dtype != np.uint32:
        raise ValueError("leads: not uint32")
