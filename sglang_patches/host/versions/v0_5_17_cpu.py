"""Work on a CPU that SGLang 0.5.17 leaves to a GPU: paged allocation, what serves a KV cache, and grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_patches.host.versions.rows import row

if TYPE_CHECKING:
    import torch
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

_BITMASK = "sglang.srt.constrained.xgrammar_backend._allocate_token_bitmask"
_APPLY_BITMASK = "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask"
_SUPPORT_TRITON = (
    "sglang.srt.mem_cache.allocation.support_triton",
    "sglang.srt.model_executor.forward_batch_info.support_triton",
)
_PAGED = "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator."

ROWS = (
    row(_BITMASK, "vocab_size batch_size", "hooked on a CPU: grammars without pinned memory"),
    row(_APPLY_BITMASK, "self logits vocab_mask", "hooked on a CPU: grammars without Triton"),
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
)


def extend_pages(
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


def decode_pages(
    stock: Callable,
    allocator: PagedTokenToKVPoolAllocator,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
) -> torch.Tensor | None:
    """Slots as from `extend_pages`, one for each request."""
    return extend_pages(
        stock, allocator, seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
    )


def _without_triton(stock: Callable, backend: str) -> bool:
    """Whether Triton serves beside an attention backend: SGLang takes any for one of a GPU but those that it knows of a CPU."""
    return False


def _unpinned_bitmask(stock: Callable, vocab_size: int, batch_size: int) -> torch.Tensor:
    """All tokens allowed, int32 [batch, words]. SGLang's lies in pinned memory, which needs a GPU."""
    from xgrammar import allocate_token_bitmask

    return allocate_token_bitmask(batch_size, vocab_size)


def _mask_on_a_cpu(
    stock: Callable, grammar: XGrammarGrammar, logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """Masks logits in place. SGLang's kernels need a GPU."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


CPU_HOOKS: dict[str, Callable] = {
    _PAGED + "alloc_extend": extend_pages,
    _PAGED + "alloc_decode": decode_pages,
    **dict.fromkeys(_SUPPORT_TRITON, _without_triton),
    _BITMASK: _unpinned_bitmask,
    _APPLY_BITMASK: _mask_on_a_cpu,
}
