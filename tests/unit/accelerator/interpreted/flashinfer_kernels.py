"""FlashInfer's wrappers on the CPU: their planning is FlashInfer's own, their kernels follow their definition."""

from __future__ import annotations

import math
from types import SimpleNamespace

import flashinfer.decode
import flashinfer.prefill
import numpy as np
import torch
from flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)
from sglang.srt.layers.attention import flashinfer_backend
from torch.overrides import TorchFunctionMode

from tests.unit.accelerator.interpreted.compiled import packbits_little, softmax_over

PLANNED = SimpleNamespace(plan=lambda *arguments: arguments)  # a compiled module that remembers its plan


class Attention:
    """What a kernel makes of the rows of its sequences: `forward` and, with the logarithm of the softmax's sum to base 2,
    `forward_return_lse`."""

    def forward(self, *tensors, **options):
        return self.forward_return_lse(*tensors, **options)[0]

    def _attend(self, q, keys_of, scale):
        """keys_of: yields for each row of each sequence the keys and values that it reads."""
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:2], torch.nan)
        for row, keys, values in keys_of:
            out[row], lse[row] = softmax_over(q[row], keys, values, scale)
        return out, lse / math.log(2)


class Prefill(Attention, BatchPrefillWithPagedKVCacheWrapper):
    """`forward` follows `DefaultAttention` in FlashInfer's attention/variants.cuh (a custom mask's bit q * kv_len + kv,
    little-endian)."""

    def __init__(self, workspace, layout, *, backend, use_cuda_graph=False, **buffers):
        assert layout == "NHD"
        self._backend, self._use_cuda_graph = backend, use_cuda_graph
        self._jit_module = PLANNED
        self._float_workspace_buffer = self._int_workspace_buffer = torch.empty(64, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(0)
        self._kv_lens_buffer = torch.empty(64, dtype=torch.int32)
        self._max_total_num_rows, self._variant_owns_mask, self.device = None, False, torch.device("cpu")
        self._custom_mask_buf = self._mask_indptr_buf = None
        for name, buffer in buffers.items():
            setattr(self, f"_{name}", buffer)
        self._fixed_batch_size = len(buffers["qo_indptr_buf"]) - 1 if use_cuda_graph else 0

    def forward_return_lse(self, q, kv_cache, *, causal, sm_scale, window_left, **_):
        self.reads = {}
        return self._attend(q, self._keys(kv_cache, causal), sm_scale)

    def _keys(self, kv_cache, causal):
        for sequence in range(self._batch_size):
            first, last = self._qo_indptr_buf[sequence : sequence + 2].tolist()
            begin, end = self._paged_kv_indptr_buf[sequence : sequence + 2].tolist()
            slots = self._paged_kv_indices_buf[begin:end].long()
            for row in range(first, last):
                seen = slots[self._visible(sequence, row - first, last - first, len(slots), causal)]
                self.reads[row] = seen.tolist()
                yield row, kv_cache[0][seen], kv_cache[1][seen]

    def _visible(self, sequence, row, rows, keys, causal):
        """bool [keys]; without a mask the queries are the sequence's last tokens"""
        if self._custom_mask_buf is None:
            return torch.arange(keys) <= keys - rows + row if causal else torch.ones(keys, dtype=torch.bool)
        bits = self._custom_mask_buf[self._mask_indptr_buf[sequence] :].numpy()
        offsets = row * keys + np.arange(keys)
        return torch.from_numpy((bits[offsets // 8] >> (offsets % 8) & 1).astype(bool))


class Ragged(Attention, BatchPrefillWithRaggedKVCacheWrapper):
    """Over keys and values that are not in the cache yet."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._jit_module = PLANNED

    def forward_return_lse(self, q, k, v, *, causal, sm_scale, **_):
        assert causal
        return self._attend(q, self._keys(k, v), sm_scale)

    def _keys(self, k, v):
        ends = self._qo_indptr_buf.tolist()
        assert ends == self._kv_indptr_buf.tolist()
        for first, last in zip(ends, ends[1:], strict=False):
            for row in range(first, last):
                yield row, k[first : row + 1], v[first : row + 1]


class Decode(Attention, BatchDecodeWithPagedKVCacheWrapper):
    """A row a sequence."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._jit_module = PLANNED

    def forward_return_lse(self, q, kv_cache, *, sm_scale, **_):
        ends = self._paged_kv_indptr_buf.tolist()
        on_host = self._plan_info[4 if self.use_tensor_cores else 3]
        assert on_host.tolist() == ends, "the work is divided for other lengths"
        slots = [self._paged_kv_indices_buf[a:b].long() for a, b in zip(ends, ends[1:], strict=False)]
        keys = ((row, kv_cache[0][seen], kv_cache[1][seen]) for row, seen in enumerate(slots))
        return self._attend(q, keys, sm_scale)


def merge_state(out_a, lse_a, out_b, lse_b):
    """Two attentions over disjoint keys as one; out [rows, heads, dim], lse [rows, heads] to base 2."""
    lse = torch.logaddexp2(lse_a, lse_b)
    return out_a * (lse_a - lse).exp2()[..., None] + out_b * (lse_b - lse).exp2()[..., None], lse


class CudaOnCpu(TorchFunctionMode):
    """What SGLang allocates on "cuda" by name, and FlashInfer in pinned memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = kwargs | {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        return function(*args, **kwargs)


def stand_in(monkeypatch) -> None:
    """Replaces what is compiled, and names what SGLang imports where there is a GPU alone."""
    monkeypatch.setattr(flashinfer.prefill, "segment_packbits", packbits_little)
    for name, value in {
        "BatchPrefillWithPagedKVCacheWrapper": Prefill,
        "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
        "BatchDecodeWithPagedKVCacheWrapper": Decode,
        "_safe_merge_state": merge_state,
        "fast_decode_plan": flashinfer.decode.fast_decode_plan,
    }.items():
        monkeypatch.setattr(flashinfer_backend, name, value, raising=False)
