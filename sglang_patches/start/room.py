"""Room for trees: in a request's row of KV slots, and of the widest verification in the memory that the KV cache has left.

SGLang reserves twice a step's slots for every running request, because overlap scheduling runs one step ahead of the results.
With page size 1 its rows are shorter than context plus reserve. A request close to the context limit then runs over its own row:
an IndexError on a CPU, slots of the next request on a GPU. The hook here makes rows long enough for the reserve.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import get_available_gpu_memory

from sglang_patches.host import hooks
from sglang_patches.host.versions import host

logger = logging.getLogger(__name__)
GIB = 1 << 30


def _reserved() -> int:
    """Tokens of a row beyond the context's length. The reserve ends on a page boundary."""
    reserve, page_size = host.reserve_per_decode()
    return reserve + page_size - 1


def _at_least_what_is_reserved(extra: int, *_: object) -> int:
    return max(extra, _reserved())


HOOKS: hooks.ByKind = {HookType.AFTER: {host.ROW_LENGTH: _at_least_what_is_reserved}}


def make_room_for_trees() -> None:
    """Before the pools are allocated; for the scheduler's process alone, as `hooks.apply`."""
    hooks.apply(HOOKS)


def check_room(row: int, context: int) -> None:
    """Raises RuntimeError when rows of `row` slots are too short: the hook above was not applied."""
    if row < context + _reserved():
        raise RuntimeError(
            f"specstore: a request's row holds {row} KV slots; at the context limit of {context} a step needs "
            f"{_reserved()} more. The hook of {', '.join(hooks.targets(HOOKS))} was not applied"
        )


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
