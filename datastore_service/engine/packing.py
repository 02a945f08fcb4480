"""Packs integers: each has as many bits as the largest needs, with no gaps between them, lowest bit first.

An element is read as part of the 64-bit word that starts at its first byte, so `PADDING` more bytes end the array.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import address_of, load_word, view_i32, view_u8

PADDING = 8
MAX_BITS = 31


def bits_for(largest: int) -> int:
    """Bits of one element if `largest` is the largest value; at least 1."""
    return max(1, largest.bit_length())


def packed_size(count: int, bits: int) -> int:
    """Bytes of `count` elements with their padding; 0 for none."""
    return -(-count * bits // 8) + PADDING if count else 0


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [packed_size]. values: int32, C-contiguous, in [0, 2^bits)."""
    packed = np.zeros(packed_size(len(values), bits), dtype=np.uint8)
    if len(values):
        _pack(address_of(values), len(values), bits, address_of(packed))
    return packed


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """int32 [count], the values that `pack` was given. packed: uint8, C-contiguous."""
    values = np.empty(count, dtype=np.int32)
    if count:
        _unpack(address_of(packed), bits, count, address_of(values))
    return values


@njit(inline="always")
def packed_value(address, bits, index):
    """Element `index` of the packed array at `address`, as int64."""
    first = index * bits
    word = load_word(address + (first >> 3)) >> np.uint64(first & 7)
    return np.int64(word & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))


@kernel
def _pack(address, count, bits, packed_address):
    values = view_i32(address, count)
    packed = view_u8(packed_address, (count * bits + 7) >> 3)
    waiting, held, at = np.uint64(0), 0, 0
    for i in range(count):
        waiting |= np.uint64(values[i]) << np.uint64(held)
        held += bits
        while held >= 8:
            packed[at] = waiting & np.uint64(255)
            waiting >>= np.uint64(8)
            held -= 8
            at += 1
    if held:
        packed[at] = waiting & np.uint64(255)


@kernel
def _unpack(packed_address, bits, count, address):
    values = view_i32(address, count)
    for i in range(count):
        values[i] = packed_value(packed_address, bits, i)
