"""SGLang 0.5.17: as 0.5.18, but accepted tokens are not relayed, the scheduler does not say that it was idle, sizes and backends are
read from `ServerArgs`, and grammars take a GPU for granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_patches.versions import v0_5_18
from sglang_patches.versions.rows import changed, row

if TYPE_CHECKING:
    import torch
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

BITMASK = "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask"
APPLY_BITMASK = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"
IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"

CPU_DECODE_FLAGS: tuple[str, ...] = ()  # a retracted request's KV is always kept in plain memory

ROWS = changed(
    v0_5_18.ROWS,
    row(
        v0_5_18.RMS_NORM,
        "self x residual post_residual_addition",
        "hooked on a CPU: fast path for few rows",
    ),
    row(v0_5_18.ROW_LENGTH, "server_args", "hooked: a request's row holds what is reserved for it"),
    row(v0_5_18.RESERVE, "server_args", "what is reserved"),
    row(
        v0_5_18.REQUEST_STATE,
        "self obj request lifecycle_id",
        "hooked: the tenant of a request",
    ),
    row(
        v0_5_18.FIRST_DRAFT_INPUT,
        "self batch server_args last_tokens_tensor future_map",
        "overridden: first draft input on a decode instance",
    ),
    row(BITMASK, "vocab_size batch_size", "hooked on a CPU: grammars without pinned memory"),
    row(APPLY_BITMASK, "self logits vocab_mask", "hooked on a CPU: grammars without Triton"),
    row(IDLE, "self", "hooked: which steps say what a width costs"),
    row("sglang.srt.runtime_context.get_server_args", "", "sizes and backends"),
    row("sglang.srt.server_args.ServerArgs.get_attention_backends", "self", "the backends of this process"),
    without=(
        "sglang.srt.runtime_context.attention_backends",
        "sglang.srt.managers.overlap_utils.FutureMap.stash",
        "sglang.srt.managers.overlap_utils.RelayPayload.from_ngram",
        "sglang.srt.managers.schedule_batch.ScheduleBatch.after_idle_gap",
    ),
)


def _unpinned_bitmask(stock: Callable, vocab_size: int, batch_size: int) -> torch.Tensor:
    """All tokens allowed, int32 [batch, words]. SGLang's lies in pinned memory, which needs a GPU."""
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


def _mask_on_a_cpu(
    stock: Callable, grammar: XGrammarGrammar, logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """In place. SGLang's kernels need a GPU."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


CPU_HOOKS: dict[str, Callable] = v0_5_18.CPU_HOOKS | {
    BITMASK: _unpinned_bitmask,
    APPLY_BITMASK: _mask_on_a_cpu,
}
_idle = False  # since the last step


def _after_idle(result: None, scheduler: Scheduler) -> None:
    global _idle
    _idle = True


SCHEDULER_HOOKS: dict[str, Callable] = {IDLE: _after_idle}


def follows_idle_gap(batch: ScheduleBatch) -> bool:
    """Whether the scheduler had nothing to do before this step. To be asked once a step."""
    global _idle
    was_idle, _idle = _idle, False
    return was_idle


def attention_backends() -> tuple[str, str]:
    """Of prefill and decode in this process. The configuration must be published."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args().get_attention_backends()


def reserve_per_decode() -> tuple[int, int]:
    """Tokens that are reserved for a request at each decode step, and those of a page. The configuration must be published."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_server_args

    return get_alloc_reserve_per_decode(), get_server_args().page_size


def relay(draft_input: NgramVerifyInput, future_map: FutureMap) -> None:
    """Hands accepted tokens to the next step under overlap scheduling: the draft input itself has them."""


def __getattr__(name: str) -> Any:
    """All else is as in 0.5.18."""
    return getattr(v0_5_18, name)
