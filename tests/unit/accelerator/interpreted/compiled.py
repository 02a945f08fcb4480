"""The compiled kernels the attention backends call, by their definition: which keys a row reads, and softmax over them."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import torch


def softmax_over(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float):
    """(out [heads, v_dim], logsumexp [heads]) of one row: q [heads, dim] over keys [n, kv_heads, dim]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1).double() for x in (keys, values))
    logits = scale * torch.einsum("hd,nhd->hn", q.double(), keys)
    out = torch.einsum("hn,nhd->hd", logits.softmax(dim=1), values)
    return out.to(q.dtype), logits.logsumexp(dim=1).to(q.dtype)


class FlashAttention:
    """FlashAttention's paged `flash_attn_with_kvcache` and SGLang's `merge_state_v2`; `reads`: every row's slots, call
    by call."""

    def __init__(self) -> None:
        self.reads: dict[int, list[int]] = {}

    def with_kvcache(
        self,
        q,
        k_cache,
        v_cache,
        *,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q,
        softmax_scale,
        causal,
        window_size,
        return_softmax_lse,
        softcap,
        num_splits,
        ver,
        cu_seqlens_k_new=None,
        out=None,
        scheduler_metadata=None,
    ):
        assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
        assert softcap == 0 and out is None
        page_size = k_cache.shape[1]
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        out = torch.full((*q.shape[:2], v_cache.shape[-1]), torch.nan)
        lse = torch.full(q.shape[:2], torch.nan)
        for sequence, length in enumerate(cache_seqlens.tolist()):
            first, last = cu_seqlens_q[sequence : sequence + 2].tolist()
            assert last - first <= max_seqlen_q
            slots = (page_table[sequence, :, None].long() * page_size + torch.arange(page_size)).flatten()
            for row in range(first, last):
                position = length - last + row  # queries are the sequence's last tokens
                end = position + 1 if causal else length
                start = max(0, position - window_size[0]) if window_size[0] >= 0 else 0
                seen = slots[start:end]
                self.reads.setdefault(row, []).extend(seen.tolist())
                out[row], lse[row] = softmax_over(q[row], keys[seen], values[seen], softmax_scale)
        return (out, lse.T) if return_softmax_lse else out

    @staticmethod
    def divided_work(*, batch_size, **_) -> torch.Tensor:
        """In place of `get_scheduler_metadata`, which says what multiprocessor takes which part: nothing that a result depends on."""
        return torch.zeros(batch_size + 1, dtype=torch.int32)

    @staticmethod
    def merge_state(out_a, lse_a, out_b, lse_b):
        """Two attentions over disjoint keys as one; out [rows, heads, dim], lse [rows, heads]."""
        lse = torch.logaddexp(lse_a, lse_b)
        return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def stand_in_for_sgl_kernel() -> None:
    """A module of names, so that what needs a GPU to import can be imported; a test that calls one replaces it."""

    def missing(*_, **__):
        raise NotImplementedError("a compiled kernel that this test does not stand in for")

    names = {
        "sgl_kernel": ("merge_state_v2",),
        "sgl_kernel.flash_attn": (
            "flash_attn_varlen_func",
            "flash_attn_with_kvcache",
            "get_scheduler_metadata",
        ),
    }
    for name, functions in names.items():
        module = ModuleType(name)
        vars(module).update(dict.fromkeys(functions, missing))
        sys.modules[name] = module


def packbits_little(
    mask: torch.Tensor, indptr: torch.Tensor, bitorder: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's `segment_packbits`: numpy's packbits of each segment, every segment beginning a byte."""
    assert mask.ndim == 1 and mask.dtype in (torch.bool, torch.uint8)
    ends = indptr.tolist()
    packed = [np.packbits(mask[a:b].numpy(), bitorder=bitorder) for a, b in zip(ends, ends[1:], strict=False)]
    starts = np.cumsum([0, *(len(p) for p in packed)])
    return torch.from_numpy(np.concatenate(packed)), torch.from_numpy(starts.astype(np.int32))
