"""How the cost of the target's linear layers grows with the rows of a step: the measured roofline of SSSD section 3.2.

The paper derives the ridge point from peak FLOP/s and bandwidth; here the loaded model's own layers are timed once at
start, which also covers quantised weights and hardware whose kernels stay far below the peak (the paper's appendix B
names them).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from sglang.srt.layers.linear import LinearBase, RowParallelLinear

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 3
BUDGET_SECONDS = 3.0  # no larger row count is timed once the measurement has taken that long

Product = Callable[[torch.Tensor], object]


def measure_row_seconds(model: torch.nn.Module, dtype: torch.dtype, device: str) -> Callable[[float], float]:
    """Times all dense linear layers of the model and its output head, one after the other, as a step does.

    Mixture-of-experts layers, attention and a step's fixed costs are not in it: what it tells is how much *more* a
    step with more rows takes, rather less than too much.

    Returns rows -> seconds, non-decreasing, linear between the measured points and on from the last two.
    """
    products = _products(model)
    rows, seconds, started = [], [], time.perf_counter()
    for count in ROWS:
        rows.append(count)
        inputs = {width: torch.randn(count, width, device=device).to(dtype) for width, _ in products}
        seconds.append(_fastest(products, inputs, device))
        if time.perf_counter() - started > BUDGET_SECONDS:
            break
    costs = np.maximum.accumulate(np.array(seconds))
    return lambda count: _interpolate(count, np.array(rows, dtype=float), costs)


def _products(model: torch.nn.Module) -> list[tuple[int, Product]]:
    """(input width, multiplication) of every layer. The quantisation method is called, not the layer, which would
    also exchange results with the other tensor-parallel ranks."""
    # Beside it a multimodal model has towers that decoding does not run.
    language = getattr(model, "model", model)
    products: list[tuple[int, Product]] = []
    for layer in language.modules():
        if isinstance(layer, LinearBase) and layer.quant_method is not None:
            width = (
                layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else layer.input_size
            )
            products.append((width, functools.partial(_apply, layer)))
    head, processor = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
    if products and head is not None and processor is not None:
        products.append((head.embedding_dim, lambda x: processor._compute_lm_head(x, head)))
    return products


def _fastest(products: list[tuple[int, Product]], inputs: dict[int, torch.Tensor], device: str) -> float:
    synchronize = torch.get_device_module(device).synchronize
    best = float("inf")
    for _ in range(REPEATS):
        synchronize()
        started = time.perf_counter()
        for width, product in products:
            product(inputs[width])
        synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _interpolate(count: float, rows: np.ndarray, costs: np.ndarray) -> float:
    if count > rows[-1] and len(rows) > 1:
        slope = (costs[-1] - costs[-2]) / (rows[-1] - rows[-2])
        return float(costs[-1] + slope * (count - rows[-1]))
    return float(np.interp(count, rows, costs))


def _apply(layer: LinearBase, x: torch.Tensor) -> object:
    return layer.quant_method.apply(layer, x)
