"""Suffix arrays of token texts, by pydivsufsort.

pydivsufsort sorts bytes: given integers it spells each with 1, 2 or 4 bytes, sorts all byte suffixes and keeps those
that start a token. The cost is the number of bytes, so ids are first replaced by their rank among the ids that occur
(the order, and with it the suffix array, stays the same) and spelled with as few bytes as ranks need.
"""

from __future__ import annotations

import numpy as np
from pydivsufsort import divsufsort

from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, view_i32, view_i64


def sort_suffixes(tokens: np.ndarray) -> np.ndarray:
    """int32 suffix array of a token array of any unsigned type."""
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
