"""Numba access to memory by address, for tensors whose layout the caller has checked."""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context, address):
    """Reinterpret an integer address as a pointer `numba.carray` can wrap."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen
