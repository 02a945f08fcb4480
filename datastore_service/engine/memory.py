"""Access to arrays by address, for kernels that take many arrays of different types as one table of addresses.

A Numba call costs about 0.2 us for each array argument, and its argument types must not depend on the number of segments
or on the width of their tokens. So kernels receive int64 addresses and read the arrays through these functions. The
caller of a kernel keeps the arrays alive during the call.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic


@intrinsic
def _pointer(typing_context, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), codegen


@intrinsic
def _store_release(typing_context, address, value):
    """Writes a number, in the width of its type, at an address, after every earlier write has become visible."""

    def codegen(context, builder, signature, args):
        value_type = context.get_value_type(signature.args[1])
        pointer = builder.inttoptr(args[0], value_type.as_pointer())
        builder.store_atomic(args[1], pointer, "release", value_type.width // 8)
        return context.get_dummy_value()

    return types.void(types.int64, value), codegen


def _load_acquire(result):
    """Makes an intrinsic that reads a number of type `result` before any later read."""

    @intrinsic
    def load(typing_context, address):
        def codegen(context, builder, signature, args):
            value_type = context.get_value_type(signature.return_type)
            pointer = builder.inttoptr(args[0], value_type.as_pointer())
            return builder.load_atomic(pointer, "acquire", value_type.width // 8)

        return result(types.int64), codegen

    return load


@intrinsic
def load_word(typing_context, address):
    """The uint64 at an address, which need not be aligned."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], context.get_value_type(types.uint64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(types.int64), codegen


@intrinsic
def prefetch(typing_context, address):
    """Requests the cache line at an address and does not wait for it."""

    def codegen(context, builder, signature, args):
        byte, number = ir.IntType(8), ir.IntType(32)
        pointer = builder.inttoptr(args[0], byte.as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], function_type)
        to_read, keep, data = number(0), number(3), number(1)
        builder.call(function, [pointer, to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


_load_acquire_i32 = _load_acquire(types.int32)
_load_acquire_i64 = _load_acquire(types.int64)


@njit(inline="always")
def publish_i32(address, index, value):
    """Writes element `index` of the int32 array at `address`. A reader that gets it by `read_i32` sees all earlier writes."""
    _store_release(address + 4 * index, np.int32(value))


@njit(inline="always")
def read_i32(address, index):
    return np.int64(_load_acquire_i32(address + 4 * index))


@njit(inline="always")
def publish_i64(address, index, value):
    _store_release(address + 8 * index, np.int64(value))


@njit(inline="always")
def read_i64(address, index):
    return _load_acquire_i64(address + 8 * index)


@njit(inline="always")
def view_i64(address, size):
    return carray(_pointer(address), size, np.int64)


@njit(inline="always")
def view_i32(address, size):
    return carray(_pointer(address), size, np.int32)


@njit(inline="always")
def view_u64(address, size):
    return carray(_pointer(address), size, np.uint64)


@njit(inline="always")
def view_u8(address, size):
    return carray(_pointer(address), size, np.uint8)


@njit(inline="always")
def load_token(address, width, index):
    """The unsigned token of `width` bytes at `index` of the array at `address`, as int64."""
    if width == 2:
        return np.int64(carray(_pointer(address), index + 1, np.uint16)[index])
    if width == 4:
        return np.int64(carray(_pointer(address), index + 1, np.uint32)[index])
    return np.int64(carray(_pointer(address), index + 1, np.uint8)[index])


def address_of(array: np.ndarray) -> int:
    """Address of a C-contiguous array's first element."""
    return array.__array_interface__["data"][0]
