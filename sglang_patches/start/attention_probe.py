"""Start-up probe: attention over a branching tree, as this server's own backend computes it, against dense attention.

An attention backend that ignores the tree mask serves wrong tokens without an error. One layer of each kind is asked about
random keys and queries; it costs well under a second, kernel compilation apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_patches.host.versions import host
from sglang_patches.start.tree_attention import verifying_backend
from sglang_patches.verification.layout import TreeLayout, attention_mask, lay_out

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

PREFIXES = (3, 40)  # cached tokens of the probed requests
# Backends that take the rotary part of latent queries and keys as arguments of their own.
ROPE_APART = ("fa3", "fa4")
TOLERANCE = 0.1  # of what a causal chain in the tree's place would change


def check_tree_attention(runner: ModelRunner, width: int) -> None:
    """Raises RuntimeError naming the attention backend when a layer of the model does not honour a tree of `width` rows.

    To be called before anything is served: it uses KV slots and request rows, and gives them back.
    """
    layers = list(_one_of_each_kind(runner))
    table = runner.req_to_token_pool.req_to_token
    prefixes = PREFIXES[-(len(table) - 1) :]  # row 0 is SGLang's; a server for one request has one more
    slots = _allocate(runner, prefixes, width)
    if slots is None:
        logger.warning("specstore: the KV cache is too small to probe tree attention")
        return
    rows = torch.arange(1, len(prefixes) + 1, device=runner.device)
    before = table[rows].clone()
    table[rows, : slots.shape[1]] = slots.to(table.dtype)
    try:
        probe = _Probe(runner, prefixes, width, rows, slots)
        for layer in layers:
            probe.check(layer)
    finally:
        table[rows] = before
        runner.token_to_kv_pool_allocator.free(slots.flatten())


def _one_of_each_kind(runner: ModelRunner) -> Iterable[RadixAttention]:
    """Layers that verify; a model of one kind of attention has one."""
    seen = set()
    for layer in runner.model.modules():
        if not isinstance(layer, RadixAttention) or layer.is_cross_attention:
            continue
        latent = layer.tp_k_head_num == 1 and layer.qk_head_dim != layer.v_head_dim
        if layer.attn_type != AttentionType.DECODER or (runner.use_mla_backend and not latent):
            continue
        kind = layer.sliding_window_size, layer.qk_head_dim, layer.v_head_dim, layer.tp_k_head_num
        if kind not in seen:
            seen.add(kind)
            yield layer


def _allocate(runner: ModelRunner, prefixes: Sequence[int], width: int) -> torch.Tensor | None:
    """int64 [requests, longest prefix + width] free KV slots, None when there are not enough."""
    allocator, page = runner.token_to_kv_pool_allocator, runner.page_size
    requests, length = len(prefixes), -(-(max(prefixes) + width) // page) * page
    if (
        runner.req_to_token_pool.req_to_token.shape[1] < length
        or allocator.available_size() < requests * length
    ):
        return None
    if page == 1:
        return allocator.alloc(requests * length).view(requests, length)
    empty, full = torch.zeros(requests, dtype=torch.int64), torch.full((requests,), length)
    device = runner.device
    last_slots = torch.full((requests,), -1, dtype=torch.int64, device=device)
    slots = allocator.alloc_extend(
        empty.to(device), empty, full.to(device), full, last_slots, requests * length
    )
    return slots.view(requests, length)


class _Probe:
    """One verification of a binary tree for each of some requests with cached tokens."""

    def __init__(
        self, runner: ModelRunner, cached: Sequence[int], width: int, rows: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._runner = runner
        self._slots = slots
        self._generator = torch.Generator().manual_seed(0)
        self._cached_tokens = cached
        prefixes = np.array(cached, dtype=np.int64)
        self._layout = _binary_tree(prefixes, width)
        self._batch = _verify_batch(runner, self._layout, prefixes, rows, slots)
        runner.attn_backend.init_forward_metadata(self._batch)

    def check(self, layer: RadixAttention) -> None:
        requests, width, _ = self._layout.mask.shape
        query = self._random(requests * width, layer.tp_q_head_num, layer.qk_head_dim)
        got = self._attend(layer, query).view(requests, width, layer.tp_q_head_num, -1).float()
        query = query.view(requests, width, *query.shape[1:])
        for request, prefix in enumerate(self._cached_tokens):
            keys, values = self._cached(layer, request, prefix + width)
            tree = torch.from_numpy(self._layout.mask[request])
            chain = torch.ones_like(tree).tril()
            right, wrong = (
                _dense_attention(query[request], keys, values, self._visible(layer, request, mask), layer)
                for mask in (tree, chain)
            )
            self._compare(layer, got[request], right, wrong)

    def _attend(self, layer: RadixAttention, query: torch.Tensor) -> torch.Tensor:
        """The backend's answer, [rows, heads * v_head_dim]; it caches keys and values of the tree on its way."""
        rows = query.shape[0]
        for keys in self._buffers(layer):
            slots = self._numbered(layer, self._slots.flatten())
            keys[slots] = self._random(len(slots), *keys.shape[1:]).to(keys.dtype)
        key = self._random(rows, layer.tp_k_head_num, layer.qk_head_dim)
        context = ForwardContext(attn_backend=self._runner.attn_backend)
        with torch.no_grad(), forward_context(context):
            if not self._runner.use_mla_backend:
                value = self._random(rows, layer.tp_k_head_num, layer.v_head_dim)
                return layer(query, key, value, self._batch)
            latent = layer.v_head_dim
            if verifying_backend() in ROPE_APART:
                rope = {"q_rope": query[..., latent:], "k_rope": key[..., latent:]}
                return layer(query[..., :latent], key[..., :latent], key[..., :latent], self._batch, **rope)
            return layer(query, key, key[..., :latent], self._batch)

    def _cached(self, layer: RadixAttention, request: int, length: int) -> list[torch.Tensor]:
        slots = self._numbered(layer, self._slots[request, :length])
        return [buffer[slots].float() for buffer in self._buffers(layer)]

    def _buffers(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [slots, heads, qk_head_dim] and values [slots, heads, v_head_dim] of the layer."""
        return self._runner.token_to_kv_pool.get_kv_buffer(layer.layer_id)

    def _numbered(self, layer: RadixAttention, slots: torch.Tensor) -> torch.Tensor:
        """The slots as the layer's pool numbers them: sliding-window layers may have a pool of their own."""
        pool = self._runner.token_to_kv_pool
        if isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]:
            return pool.translate_loc_from_full_to_swa(slots).long()
        return slots

    def _visible(self, layer: RadixAttention, request: int, mask: torch.Tensor) -> torch.Tensor:
        """bool [width, prefix + width]: what each row of the tree may attend to."""
        width, prefix = mask.shape[0], self._cached_tokens[request]
        visible = torch.cat([torch.ones(width, prefix, dtype=torch.bool), mask], dim=1)
        if layer.sliding_window_size > 0:
            rows = torch.from_numpy(self._layout.positions).view(-1, width)[request]
            columns = torch.cat([torch.arange(prefix), rows])
            visible &= rows[:, None] - columns <= layer.sliding_window_size
        return visible.to(self._runner.device)

    def _compare(
        self, layer: RadixAttention, got: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor
    ) -> None:
        error = float((got - right).abs().max())
        allowed = TOLERANCE * max(float((wrong - right).abs().max()), 1.0 if got.shape[0] < 3 else 0.0)
        if not error <= allowed:  # also when it is not a number
            raise RuntimeError(
                f"specstore: attention backend {verifying_backend()} does not honour draft trees: layer "
                f"{layer.layer_id} is off by {error:.3g}, at most {allowed:.3g} is rounding. "
                "Choose another with --attention-backend"
            )

    def _random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.to(self._runner.device, self._runner.dtype)


def _binary_tree(prefixes: np.ndarray, width: int) -> TreeLayout:
    nodes = np.arange(width - 1, dtype=np.int32)
    packed = np.stack([nodes + 1, nodes // 2 - 1])
    return lay_out(np.stack([packed] * len(prefixes)), np.zeros(len(prefixes), np.int64), prefixes)


def _verify_batch(
    runner: ModelRunner, layout: TreeLayout, prefixes: np.ndarray, rows: torch.Tensor, slots: torch.Tensor
) -> ForwardBatch:
    device, width = runner.device, layout.mask.shape[1]
    lengths = torch.from_numpy(prefixes)
    tree_slots = [slots[request, prefix : prefix + width] for request, prefix in enumerate(prefixes.tolist())]
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(prefixes),
        input_ids=torch.from_numpy(layout.tokens).to(device),
        req_pool_indices=rows,
        seq_lens=lengths.to(device),
        out_cache_loc=torch.cat(tree_slots),
        seq_lens_sum=int(prefixes.sum()),
        seq_lens_cpu=lengths,
        positions=torch.from_numpy(layout.positions).to(device),
        spec_algorithm=runner.spec_algorithm,
        spec_info=NgramVerifyInput(
            draft_token=torch.from_numpy(layout.tokens).to(device),
            custom_mask=attention_mask(layout.mask, prefixes, device),
            positions=torch.from_numpy(layout.positions).to(device),
            retrieve_index=torch.from_numpy(layout.retrieve_index).to(device),
            retrieve_next_token=torch.from_numpy(layout.next_token).to(device),
            retrieve_next_sibling=torch.from_numpy(layout.next_sibling).to(device),
            draft_token_num=width,
        ),
    )
    host.place_kv(runner, batch)
    return batch


def _dense_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    layer: RadixAttention,
) -> torch.Tensor:
    """float32 [rows, heads, v_head_dim]. query: [rows, heads, d]. keys, values: [columns, kv heads, d]. visible: [rows,
    columns]."""
    share = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * layer.scaling
    if layer.logit_cap > 0:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
