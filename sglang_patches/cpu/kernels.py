"""Single-pass row kernels for a step of few rows: RMS norm with residual, rotary embedding.

Stock SGLang composes these from ten or more torch calls each, which at a few rows cost far more in dispatch than in
arithmetic. Here each is one Numba call over raw addresses (the callers in `layers` own the tensors and check their
layout). Arithmetic is float32 whatever the storage, and a row's result does not depend on how many rows there are.
Numba has no bfloat16; it is handled as its 16 bits.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

# Sums may be reordered (that is what vectorises them); NaN and infinity keep their meaning.
_FLAGS = {"nogil": True, "fastmath": {"contract", "reassoc", "nsz", "arcp"}}


_STORAGES = {torch.float32: np.float32, torch.bfloat16: np.uint16}


@intrinsic
def _float_of(typing_context, bits):
    """The float32 with the bits of a uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def _bits_of(typing_context, value):
    """The bits of a float32 as a uint32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


def load(array, i):
    """Element `i` as float32; uint16 elements are bfloat16 bits."""
    raise NotImplementedError("only inside compiled kernels")


def store(array, i, value):
    """Write float32 `value` in the array's storage, rounding to nearest even."""
    raise NotImplementedError("only inside compiled kernels")


@overload(load)
def _load(array, i):
    if array.dtype == types.uint16:
        return lambda array, i: _float_of(np.uint32(array[i]) << np.uint32(16))
    return lambda array, i: array[i]


@numba.njit
def _bfloat16_bits(value):
    bits = _bits_of(value)
    if value != value:
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@overload(store)
def _store(array, i, value):
    if array.dtype == types.uint16:

        def store_bits(array, i, value):
            array[i] = _bfloat16_bits(np.float32(value))

        return store_bits

    def store_float(array, i, value):
        array[i] = value

    return store_float


@numba.njit(**_FLAGS)
def _normalise(row, weight, out, eps):
    total = np.float32(0)
    for i in range(row.shape[0]):
        total += row[i] * row[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(row.shape[0]) + np.float32(eps))
    for i in range(row.shape[0]):
        store(out, i, row[i] * scale * load(weight, i))


@numba.njit(**_FLAGS)
def _rotate(head, cos_sin, half, stride, second):
    """Rotate pairs (i * stride, i * stride + second) of one head by the angles cos_sin = cos | sin."""
    for i in range(half):
        cos, sin = load(cos_sin, i), load(cos_sin, half + i)
        a, b = load(head, i * stride), load(head, i * stride + second)
        store(head, i * stride, a * cos - b * sin)
        store(head, i * stride + second, b * cos + a * sin)


def _rms_norm(storage):
    @numba.njit(cache=True, **_FLAGS)
    def rms_norm(x, residual, weight, out, rows, width, eps):
        xs = numba.carray(pointer(x), (rows, width), storage)
        weights = numba.carray(pointer(weight), width, storage)
        outs = numba.carray(pointer(out), (rows, width), storage)
        row = np.empty(width, np.float32)
        for r in range(rows):
            for i in range(width):
                row[i] = load(xs[r], i)
            _normalise(row, weights, outs[r], eps)

    return rms_norm


def _add_rms_norm(storage):
    @numba.njit(cache=True, **_FLAGS)
    def add_rms_norm(x, residual, weight, out, rows, width, eps):
        xs = numba.carray(pointer(x), (rows, width), storage)
        residuals = numba.carray(pointer(residual), (rows, width), storage)
        weights = numba.carray(pointer(weight), width, storage)
        outs = numba.carray(pointer(out), (rows, width), storage)
        row = np.empty(width, np.float32)
        for r in range(rows):
            for i in range(width):
                row[i] = load(xs[r], i) + load(residuals[r], i)
                store(residuals[r], i, row[i])
            _normalise(row, weights, outs[r], eps)

    return add_rms_norm


def _rope(storage):
    @numba.njit(cache=True, **_FLAGS)
    def rope(x, row_stride, heads, head_size, cache, cache_rows, rotary, positions, rows, neox):
        xs = numba.carray(pointer(x), (rows - 1) * row_stride + heads * head_size, storage)
        angles = numba.carray(pointer(cache), (cache_rows, rotary), storage)
        at = numba.carray(pointer(positions), rows, np.int64)
        half = rotary // 2
        stride, second = (1, half) if neox else (2, 1)
        for r in range(rows):
            if at[r] < 0 or at[r] >= cache_rows:
                raise IndexError("positions: beyond the rotary embedding's table")
            for h in range(heads):
                start = r * row_stride + h * head_size
                _rotate(xs[start : start + head_size], angles[at[r]], half, stride, second)

    return rope


# By storage type. All take addresses; matrices are row-major [rows, width].
RMS_NORM = {dtype: _rms_norm(storage) for dtype, storage in _STORAGES.items()}
ADD_RMS_NORM = {dtype: _add_rms_norm(storage) for dtype, storage in _STORAGES.items()}
ROPE = {dtype: _rope(storage) for dtype, storage in _STORAGES.items()}


@intrinsic
def pointer(typing_context, address):
    """Reinterpret an integer address as a pointer `numba.carray` can wrap."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen
