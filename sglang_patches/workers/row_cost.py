"""How the cost of the target's linear layers grows with the rows of a step: the measured roofline of SSSD section 3.2.

The paper derives the ridge point from peak FLOP/s and bandwidth; here the layers' own shape is timed on the device
instead, which also covers hardware whose kernels stay far below the peak (the paper's appendix B names them).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 5
BUDGET_SECONDS = 0.5  # the larger row counts are extrapolated once the measurement has taken that long


def measure_row_curve(
    hidden: int, intermediate: int, dtype: torch.dtype, device: str
) -> Callable[[float], float]:
    """Times x @ W for W [2 * intermediate, hidden] (the gate and up projections, a decoder layer's largest product).

    Returns rows -> seconds, non-decreasing, linear between the measured points and beyond the last one.
    """
    weight = torch.randn(2 * intermediate, hidden, device=device).to(dtype)
    rows, seconds, started = [], [], time.perf_counter()
    for count in ROWS:
        rows.append(count)
        seconds.append(_fastest(torch.randn(count, hidden, device=device).to(dtype), weight))
        if time.perf_counter() - started > BUDGET_SECONDS:
            break
    costs = np.maximum.accumulate(np.array(seconds))
    return lambda count: _interpolate(count, np.array(rows, dtype=float), costs)


def _fastest(x: torch.Tensor, weight: torch.Tensor) -> float:
    synchronize = torch.get_device_module(x.device).synchronize
    best = float("inf")
    for _ in range(REPEATS):
        synchronize()
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        synchronize()
        best = min(best, time.perf_counter() - started)
    return best


def _interpolate(count: float, rows: np.ndarray, costs: np.ndarray) -> float:
    if count > rows[-1]:
        return float(costs[-1] * count / rows[-1])
    return float(np.interp(count, rows, costs))
