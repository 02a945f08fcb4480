"""Weights in oneDNN's blocked layout, so that a product of few rows streams them once instead of reordering them.

With row-major weights every call of a linear layer reorders them again, which costs more than one row's arithmetic. With
packed weights eight rows take the time of one. The packed copy costs the weights' size once more.
"""

import functools
import logging

import torch

logger = logging.getLogger(__name__)

# The layout is chosen for this many rows. It is as good for 1 to 128 (docs/optimisations.md).
ROWS_HINT = 8

_generation = 0


def forget_all(*_: object, **__: object) -> None:
    """After a weight update: every packed copy is made again at its next use."""
    global _generation
    _generation += 1


def packed(layer, weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out, in] in oneDNN's layout, kept on `layer`; made at first use and after `forget_all`."""
    key = (_generation, weight.data_ptr())
    kept = getattr(layer, "_specstore_packed", None)
    if kept is None or kept[0] != key:
        kept = (key, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT))
        layer._specstore_packed = kept
    return kept[1]


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for it (AVX-512 bf16 or AMX)."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type on this processor. Logs once if it does not multiply bfloat16."""
    if dtype == torch.bfloat16:
        if not multiplies_bfloat16():
            logger.warning(
                "specstore: this processor has no bfloat16 arithmetic, so each row of a step costs as much as the first, in a"
                " batch as in a draft; --dtype float32 is faster"
            )
        return multiplies_bfloat16()
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


def multiply(x: torch.Tensor, layer, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] @ weight.T + bias. In float32 a row's result does not depend on the other rows; in bfloat16 it may differ by a
    rounding."""
    # oneDNN sums a single row in another order than two or more (measured up to 128; tests/unit/cpu checks it).
    rows = x.expand(2, -1).contiguous() if len(x) == 1 else x
    return torch.ops.mkldnn._linear_pointwise(rows, packed(layer, weight), bias, "none", [], "")[: len(x)]
