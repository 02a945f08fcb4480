"""SGLang 0.5.21: as 0.5.22, but layers hand out no hidden states, there is no watermark and no size of data-parallel attention, and what
serves a KV cache on a CPU takes Triton for granted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_patches.versions import v0_5_22
from sglang_patches.versions.rows import changed, row

if TYPE_CHECKING:
    import torch
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_SUPPORT_TRITON = (
    "sglang.srt.mem_cache.allocation.support_triton",
    "sglang.srt.model_executor.forward_batch_info.support_triton",
)
_PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."

EARLY_EXITS = False
ONLY_SUPPORTED = {"enable_pd_role_switch": False}

ROWS = changed(
    v0_5_22.ROWS,
    row(
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
        "target_worker batch accept_lens accept_index draft_token_num",
        "hybrid models",
    ),
    row(
        "sglang.srt.layers.sampler.Sampler.forward",
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
        "the target's own sampling, at every node",
    ),
    row(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc.__init__",
        "self loc swa_loc full_loc",
        "slots that a step writes",
    ),
    row("sglang.srt.server_args.ServerArgs.enable_dp_attention", None, "data-parallel attention is refused"),
    row(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.rebind_write_loc",
        "self forward_batch",
        "KV slots of batches that the plugin makes",
    ),
    row(
        _PAGED + "alloc_extend",
        "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
        "hooked on a CPU: page sizes above 1 without Triton",
    ),
    row(_PAGED + "alloc_decode", "self seq_lens seq_lens_cpu last_loc", "as above"),
    *(row(path, "backend", "hooked on a CPU: there is no Triton") for path in _SUPPORT_TRITON),
    row(
        "sglang.srt.mem_cache.allocator.paged.alloc_extend_naive",
        "prefix_lens seq_lens last_loc free_pages out_indices page_size device",
        "as above",
    ),
    without=(
        "sglang.srt.layers.aux_hidden_states.AuxHiddenStateList.capture",
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.own_plan",
        "sglang.srt.models.llama.LlamaDecoderLayer.forward",
        "sglang.srt.runtime_context.attn_dp_enabled_of",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.has_watermark_candidates",
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.max_top_k",
        "sglang.srt.server_args.ServerArgs.enable_watermark",
    ),
)


def attention_is_data_parallel(view: ResolvedView) -> bool:
    """Whether ranks share the attention by requests."""
    return view.enable_dp_attention


def watermarked(info: SamplingBatchInfo) -> bool:
    """Whether the output of a request may carry a watermark."""
    return False


def widest_top_k(top_ks: Sequence[int]) -> dict[str, int | None]:
    """The field of `SamplingBatchInfo` that says which columns a top-k may keep, for rows with these."""
    return {}


def place_kv(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Tells the batch where its slots lie, as the scheduler does for its own batches."""
    runner.kv_index_translator.rebind_write_loc(batch)


def _extend_pages(
    stock: Callable,
    allocator: PagedTokenToKVPoolAllocator,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """Slots behind the last one of each request, int64 [extend_num_tokens]; None if there are too few. In torch, not in Triton."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    size, device = allocator.page_size, allocator.device
    pages = int((-(-seq_lens_cpu // size) + -prefix_lens_cpu // size).sum())
    if pages > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    if pages > len(allocator.free_pages):
        return None
    slots = torch.empty(extend_num_tokens, dtype=torch.int64, device=device)
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, allocator.free_pages, slots, size, device)
    allocator.free_pages = allocator.free_pages[pages:]
    return slots


def _decode_pages(
    stock: Callable,
    allocator: PagedTokenToKVPoolAllocator,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """As above, of one slot a request."""
    return _extend_pages(
        stock, allocator, seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
    )


def _without_triton(stock: Callable, backend: str) -> bool:
    """Whether Triton serves beside an attention backend: SGLang takes any for one of a GPU but those that it knows of a CPU."""
    return False


CPU_HOOKS: dict[str, Callable] = {
    _PAGED + "alloc_extend": _extend_pages,
    _PAGED + "alloc_decode": _decode_pages,
    **dict.fromkeys(_SUPPORT_TRITON, _without_triton),
}


def __getattr__(name: str) -> Any:
    """All else is as in 0.5.22."""
    return getattr(v0_5_22, name)
