"""Numbers of the host for the draft model's device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from sglang.srt.utils import is_pin_memory_available

ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for an address that is not a multiple of it


def on_device(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, torch.Tensor]:
    """The arrays on the device, with their types and shapes. One copy brings them all, and the host does not wait for it."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values()]
    begins = np.cumsum([0, *sizes]).tolist()
    packed = torch.empty(begins.pop(), dtype=torch.uint8, pin_memory=is_pin_memory_available(device))
    for begin, array in zip(begins, arrays.values(), strict=True):
        packed.numpy()[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    moved = packed.to(device, non_blocking=True)
    return {
        name: moved[begin : begin + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for (name, array), begin in zip(arrays.items(), begins, strict=True)
    }
