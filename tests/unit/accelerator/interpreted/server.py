"""What SGLang's attention backends read of a server, on the CPU: its real pools and index translator, few settings."""

from __future__ import annotations

import functools
import json
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args, get_spec
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_patches.plugin import register
from tests.unit.accelerator.interpreted.graphs import Graphs
from tests.unit.accelerator.trees import Verification

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LATENT, ROPE = 256, 32  # MLA: the smallest sizes the Triton kernel splits into latent and rotary parts
CONTEXT, REQUESTS, SLOTS = 256, 8, 2048


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 16,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "vocab_size": 97,
    "torch_dtype": "float32",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": KV_HEADS}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": None,
}


@functools.cache
def model_config(mla: bool, context: int = CONTEXT) -> ModelConfig:
    sizes = COMMON | {"max_position_embeddings": context} | (DEEPSEEK if mla else LLAMA)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(sizes))
        return ModelConfig(folder)


@functools.cache
def algorithm() -> object:
    register()
    return SpeculativeAlgorithm.from_string("SSSD")


def settings(width: int, topk: int = 2, **more):
    """SGLang's settings of a server that verifies `width` rows a request."""
    return plain_settings(
        speculative_num_draft_tokens=width,
        speculative_eagle_topk=topk,
        speculative_num_steps=max(1, width // 2),
        **more,
    )


@contextmanager
def plain_settings(**more):
    """SGLang's settings of a server that decodes plainly."""
    with (
        get_context().override_server_args(device="cpu", **more),
        get_parallel().override(
            attn_tp_size=1, attn_tp_rank=0, attn_dcp_rank=0, attn_cp_size=1, attn_cp_rank=0
        ),
    ):
        yield


class Pools:
    """SGLang's pools, filled with noise, and what its backends read of them. context: tokens of a request. slots: of all."""

    def __init__(
        self,
        *,
        requests: int = REQUESTS,
        context: int = CONTEXT,
        slots: int = SLOTS,
        page_size: int = 1,
        window: int | None = None,
        mla: bool = False,
    ):
        self.page_size, self.window, self.mla = page_size, window, mla
        self._context, self._slots = context, slots
        self.rng = np.random.default_rng(7)
        self.requests = ReqToTokenPool(requests, context, "cpu", False)
        self.kv = self._kv_pool()
        self.allocator = SimpleNamespace(get_kvcache=lambda: self.kv)
        self.translator = KVIndexTranslator(
            req_to_token=self.requests.req_to_token,
            token_to_kv_pool_allocator=self.allocator,
            token_to_kv_pool=self.kv,
            page_size=page_size,
            device="cpu",
        )

    def _kv_pool(self):
        common = {
            "page_size": self.page_size,
            "dtype": torch.float32,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        if self.mla:
            pool = MLATokenToKVPool(
                self._slots, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=1, **common
            )
            buffers = pool.kv_buffer
        else:
            pool = MHATokenToKVPool(
                self._slots,
                head_num=KV_HEADS,
                head_dim=HEAD_DIM,
                layer_num=2,
                enable_kv_cache_copy=True,
                **common,
            )
            buffers = [*pool.k_buffer, *pool.v_buffer]
        for buffer in buffers:
            buffer.copy_(self.noise(*buffer.shape))
        return pool

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.normal(size=shape).astype(np.float32))

    def model_runner(self, spec_algorithm: object) -> SimpleNamespace:
        return SimpleNamespace(
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.kv,
            token_to_kv_pool_allocator=self.allocator,
            kv_index_translator=self.translator,
            model_config=model_config(self.mla, self._context),
            sliding_window_size=self.window,
            page_size=self.page_size,
            decode_num_tokens_per_req=lambda: get_spec().speculative_num_draft_tokens or 1,
            is_draft_worker=False,
            spec_algorithm=spec_algorithm,
            kv_cache_dtype=torch.float32,
            kv_cache_dtype_str="auto",
            dtype=torch.float32,
            device="cpu",
            gpu_id=0,
            server_args=get_server_args(),
            prefill_attention_backend_str=None,
            decode_attention_backend_str=None,
        )

    def layer(self, number: int = 0) -> RadixAttention:
        if self.mla:
            return RadixAttention(HEADS, LATENT + ROPE, 0.1, 1, number, v_head_dim=LATENT)
        return RadixAttention(HEADS, HEAD_DIM, 0.25, KV_HEADS, number, sliding_window_size=self.window or -1)


class Server(Pools):
    """Request r of a batch lives in row `rows[r]`, its tokens in slots scattered by page."""

    def __init__(self, verification: Verification, **pools):
        super().__init__(**pools)
        self.verification = verification
        self.rows = torch.tensor([5, 2, 6, 3, 8, 1])[: verification.batch_size]
        self._give_slots()

    def _give_slots(self) -> None:
        pages = 1 + self.rng.permutation(SLOTS // self.page_size)
        per_request = CONTEXT // self.page_size
        for i, row in enumerate(self.rows.tolist()):
            own = pages[i * per_request : (i + 1) * per_request, None] * self.page_size
            slots = (own + np.arange(self.page_size)).reshape(-1)
            self.requests.req_to_token[row, : len(slots)] = torch.from_numpy(slots).int()

    def slots(self, request: int) -> np.ndarray:
        """The request's slots by position, cached tokens and then its verified rows."""
        return self.requests.req_to_token[self.rows[request]].numpy()

    def attended_slots(self, request: int, row: int) -> list[int]:
        return self.slots(request)[self.verification.attended(request, row)].tolist()

    def write_slots(self) -> torch.Tensor:
        v = self.verification
        rows = [self.slots(r)[s : s + v.width] for r, s in enumerate(v.seq_lens)]
        return torch.from_numpy(np.concatenate(rows).astype(np.int64))

    def verify_input(self, mask: torch.Tensor | None = None) -> NgramVerifyInput:
        layout = self.verification.layout
        return NgramVerifyInput(
            draft_token=torch.from_numpy(layout.tokens),
            custom_mask=self.verification.mask if mask is None else mask,
            positions=torch.from_numpy(layout.positions),
            retrieve_index=torch.from_numpy(layout.retrieve_index),
            retrieve_next_token=torch.from_numpy(layout.next_token),
            retrieve_next_sibling=torch.from_numpy(layout.next_sibling),
            draft_token_num=self.verification.width,
        )

    def forward_batch(self, mask: torch.Tensor | None = None) -> ForwardBatch:
        """The batch of the target's forward, as the worker hands it over."""
        v = self.verification
        lengths = torch.from_numpy(v.seq_lens)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=v.batch_size,
            input_ids=torch.from_numpy(v.layout.tokens),
            req_pool_indices=self.rows,
            seq_lens=lengths,
            out_cache_loc=self.write_slots(),
            seq_lens_sum=int(v.seq_lens.sum()),
            seq_lens_cpu=lengths.clone(),
            positions=torch.from_numpy(v.layout.positions),
            spec_info=self.verify_input(mask),
            spec_algorithm=algorithm(),
        )
        self.translator.bind_own_plan(batch)
        return batch

    def graph_batch(self, backend: AttentionBackend, mask: torch.Tensor | None = None) -> ForwardBatch:
        """The batch that a captured graph of REQUESTS requests replays, its backend's tables filled."""
        width = self.verification.width
        tokens = REQUESTS * width
        fill = backend.get_cuda_graph_seq_len_fill_value()
        spec_info = NgramVerifyInput(
            custom_mask=torch.ones((REQUESTS * fill + tokens) * width, dtype=torch.bool),
            draft_token_num=width,
        )
        of_mode = {"spec_algorithm": algorithm(), "spec_info": spec_info}
        graphs = Graphs(backend, self.translator, ForwardMode.TARGET_VERIFY, [REQUESTS], width, **of_mode)
        return graphs.replay(self.forward_batch(mask))

    def attend(
        self,
        backend_class: type[AttentionBackend],
        *,
        graph: bool = False,
        mask: torch.Tensor | None = None,
        columns=None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """One layer over the trees: (what the backend makes of it, what dense attention over `columns(request, row)`
        makes of it, the tree's own by default), both [batch, width, heads, dim]."""
        backend, layer = backend_class(self.model_runner(algorithm())), self.layer()
        if graph:
            batch = self.graph_batch(backend, mask)
        else:
            batch = self.forward_batch(mask)
            backend.init_forward_metadata(batch)
        q, k, v = self.queries(batch.batch_size)
        out = backend.forward_extend(q, k, v, layer, batch)
        expected = dense_attention(self, layer, q, columns or self.verification.attended)
        return out.view(batch.batch_size, *expected.shape[1:])[: len(expected)].numpy(), expected

    def queries(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of the verified rows, as a layer hands them to its backend."""
        rows = batch_size * self.verification.width
        if self.mla:
            k = self.noise(rows, 1, LATENT + ROPE)
            return self.noise(rows, HEADS * (LATENT + ROPE)), k, k[..., :LATENT]
        k, v = self.noise(rows, KV_HEADS, HEAD_DIM), self.noise(rows, KV_HEADS, HEAD_DIM)
        return self.noise(rows, HEADS * HEAD_DIM), k, v


def dense_attention(server: Server, layer: RadixAttention, q: torch.Tensor, columns) -> np.ndarray:
    """[rows, heads, v_dim] in float64: every row over the keys of `columns(request, row)`, read from the cache, which
    has the rows' own keys by then."""
    v = server.verification
    if server.mla:
        keys = server.kv.kv_buffer[0].double().numpy()
        values = keys[..., :LATENT]
    else:
        keys, values = (buffer[0].double().numpy() for buffer in (server.kv.k_buffer, server.kv.v_buffer))
    queries = q.view(-1, v.width, HEADS, q.shape[-1] // HEADS).double().numpy()
    group = HEADS // keys.shape[1]
    out = np.empty((v.batch_size, v.width, HEADS, values.shape[-1]))
    for request in range(v.batch_size):
        slots = server.slots(request)
        for row in range(v.width):
            seen = slots[columns(request, row)]
            k = np.repeat(keys[seen], group, axis=1)
            weights = np.exp(layer.scaling * np.einsum("hd,khd->kh", queries[request, row], k))
            out[request, row] = np.einsum(
                "kh,khd->hd", weights / weights.sum(0), np.repeat(values[seen], group, axis=1)
            )
    return out
