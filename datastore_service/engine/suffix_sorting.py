"""Builds suffix arrays of token texts with pydivsufsort.

pydivsufsort sorts bytes: it spells each integer with 1, 2 or 4 bytes, sorts all byte suffixes and keeps those that start
at a token. The cost grows with the number of bytes. So each id is first replaced by its rank among the ids that occur,
which keeps the order and so the suffix array, and ranks are spelled with as few bytes as they need.
"""

from __future__ import annotations

import ctypes

import numpy as np
from pydivsufsort.dll import libdivsufsort, libdivsufsort64

from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, load_token, view_i32, view_i64


def sort_suffixes(tokens: np.ndarray, threads: int = 1) -> np.ndarray:
    """int32 suffix array of a token array of any unsigned type. threads: used for parts of the work; one in a service, where
    more would take processors from the queries."""
    if len(tokens) == 0:
        return np.empty(0, dtype=np.int32)
    ranks, distinct = _ranks(tokens)
    width = max(1, ((distinct - 1).bit_length() + 7) // 8)
    spelled = np.empty((len(tokens), width), dtype=np.uint8)
    _spell(ranks, spelled)
    suffixes = _byte_suffixes(spelled, threads)
    if width == 1 and suffixes.dtype == np.int32:
        return suffixes
    return _token_suffixes(address_of(suffixes), suffixes.itemsize, len(suffixes), width, len(tokens))


def _byte_suffixes(spelled: np.ndarray, threads: int) -> np.ndarray:
    """Suffix array of bytes: int32, or int64 if the text needs it. spelled: uint8, C-contiguous.

    It calls pydivsufsort's C library directly: the Python half allocates and clears the result while it holds the GIL,
    and queries would wait milliseconds for that."""
    size = spelled.size
    large = size > np.iinfo(np.int32).max
    suffixes = np.empty(size, dtype=np.int64 if large else np.int32)
    number = ctypes.c_int64 if large else ctypes.c_int32
    sort = libdivsufsort64.divsufsort64 if large else libdivsufsort.divsufsort
    libdivsufsort.omp_set_num_threads(threads)  # of this thread, in the library's own OpenMP
    failed = sort(ctypes.c_void_p(address_of(spelled)), ctypes.c_void_p(address_of(suffixes)), number(size))
    if failed:
        raise MemoryError(f"sorting {size} bytes: libdivsufsort's status {failed}")
    return suffixes


def _ranks(tokens: np.ndarray) -> tuple[np.ndarray, int]:
    """Each token's rank among the distinct tokens, uint32, and the number of distinct tokens."""
    span = int(tokens.max()) + 1
    if span > max(1 << 20, 2 * len(tokens)):  # a table by id would be larger than the text
        distinct, ranks = np.unique(tokens, return_inverse=True)
        return ranks.astype(np.uint32), len(distinct)
    ranks = np.empty(len(tokens), dtype=np.uint32)
    tokens = np.ascontiguousarray(tokens)
    return ranks, _rank(address_of(tokens), tokens.itemsize, np.zeros(span, dtype=np.uint32), ranks)


@kernel
def _rank(address, width, table, ranks):
    """Fills ranks (uint32 [size]) for the tokens at `address`; returns the number of distinct tokens. table: uint32
    [largest id + 1], zeros. It is a kernel because NumPy would hold the GIL, and queries would wait for it."""
    for i in range(len(ranks)):
        table[load_token(address, width, i)] = 1
    distinct = 0
    for token in range(len(table)):
        present = table[token]
        table[token] = distinct
        distinct += present
    for i in range(len(ranks)):
        ranks[i] = table[load_token(address, width, i)]
    return distinct


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
