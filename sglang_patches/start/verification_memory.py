"""What the widest verification takes of the memory that the KV cache has left.

A plain step has logits of one row a request, a verification of as many as the tree is wide. SGLang sizes its KV cache without
them. Checked at the start, or else the first full batch would fail.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.utils import get_available_gpu_memory

logger = logging.getLogger(__name__)

GIB = 1 << 30


def logits_bytes(rows: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Bytes of the rows' logits, both as the model computes them and as SGLang hands them out in float32."""
    return rows * vocabulary * (dtype.itemsize + torch.float32.itemsize)


def check_verification_memory(
    rows: int, vocabulary: int, dtype: torch.dtype, device: str, gpu_id: int
) -> None:
    """Raises RuntimeError if there is no room for a step's logits. The error says what they take.

    rows: most of a step.
    """
    free = get_available_gpu_memory(torch.device(device).type, gpu_id)
    needed = logits_bytes(rows, vocabulary, dtype) / GIB
    taken = f"the logits of a step with {rows} rows take {needed:.2f} GiB, {free:.2f} GiB are free"
    if needed > free:
        raise RuntimeError(
            f"specstore: {taken} beside the KV cache. Lower --mem-fraction-static, --max-running-requests or --specstore-nodes"
        )
    logger.info("specstore: %s", taken)
