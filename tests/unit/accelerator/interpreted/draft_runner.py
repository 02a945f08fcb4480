"""A draft model of two layers over one of SGLang's attention backends, in place of SGLang's model runner; and the same model in NumPy,
with dense attention over a whole text."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.unit.accelerator.interpreted.graphs import Graphs
from tests.unit.accelerator.interpreted.server import COMMON, HEAD_DIM, HEADS, KV_HEADS, Pools

VOCABULARY, HIDDEN, LAYERS, SCALE = COMMON["vocab_size"], COMMON["hidden_size"], 2, 0.25


class Weights:
    """Random ones, in float32. A token's place has an embedding of its own, so that a wrong position is seen."""

    def __init__(self, context: int) -> None:
        rng = np.random.default_rng(3)

        def random(*shape: int) -> np.ndarray:
            return (rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

        self.tokens, self.places = 8 * random(VOCABULARY, HIDDEN), 12 * random(context, HIDDEN)
        self.layers = [
            SimpleNamespace(
                q=4 * random(HIDDEN, HEADS * HEAD_DIM),
                k=random(HIDDEN, KV_HEADS * HEAD_DIM),
                v=random(HIDDEN, KV_HEADS * HEAD_DIM),
                o=random(HEADS * HEAD_DIM, HIDDEN),
            )
            for _ in range(LAYERS)
        ]
        self.head = 2 * random(HIDDEN, VOCABULARY)

    def logits_after(self, text: list[int]) -> np.ndarray:
        """float64 [vocabulary], with dense attention"""
        x = (self.tokens[text] + self.places[: len(text)]).astype(np.float64)
        later = np.triu(np.ones((len(text), len(text)), bool), 1)
        for layer in self.layers:
            q = (x @ layer.q).reshape(len(text), HEADS, HEAD_DIM)
            k, v = ((x @ of).reshape(len(text), KV_HEADS, HEAD_DIM) for of in (layer.k, layer.v))
            k, v = (of.repeat(HEADS // KV_HEADS, axis=1) for of in (k, v))
            scores = SCALE * np.einsum("qhd,khd->hqk", q, k)
            weights = np.exp(np.where(later, -np.inf, scores - scores.max(axis=-1, keepdims=True)))
            attended = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)
            x = x + attended.reshape(len(text), -1) @ layer.o
        return x[-1] @ self.head


class DraftRunner(Pools):
    """What `SglangModel` knows of a runner. graphs: row counts for which decode batches are captured, none where they run eagerly.
    batches: mode, tokens before each text of a prefill, and rows of each that was run."""

    device, spec_algorithm = "cpu", SpeculativeAlgorithm.NONE

    def __init__(
        self,
        backend: type[AttentionBackend],
        *,
        requests: int,
        context: int,
        slots: int,
        graphs: tuple[int, ...] = (),
    ) -> None:
        super().__init__(requests=requests, context=context, slots=slots)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", self.kv, False)
        self.req_to_token_pool, self.kv_index_translator = self.requests, self.translator
        runner = self.model_runner(self.spec_algorithm)
        self.model_config = runner.model_config
        self.weights = Weights(context)
        self._backend = backend(runner)
        self._layers = [self.layer(number) for number in range(LAYERS)]
        mode = ForwardMode.DECODE
        self._graphs = Graphs(self._backend, self.translator, mode, graphs) if graphs else None
        self.batches: list[tuple[ForwardMode, tuple[int, ...], int]] = []

    def forward(self, batch: ForwardBatch) -> SimpleNamespace:
        mode, rows = batch.forward_mode, len(batch.input_ids)
        self.batches.append((mode, tuple(batch.extend_prefix_lens_cpu or ()), rows))
        if mode.is_decode() and self._graphs:
            batch = self._graphs.replay(batch)
        else:
            self._backend.init_forward_metadata(batch)
        logits = self._logits(batch)
        logits = logits[:rows] if mode.is_decode() else logits[-1:]
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits))

    def _logits(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 [rows, vocabulary]"""
        weights, backend = self.weights, self._backend
        attend = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
        x = (
            torch.from_numpy(weights.tokens)[batch.input_ids]
            + torch.from_numpy(weights.places)[batch.positions]
        )
        for of, layer in zip(weights.layers, self._layers, strict=True):
            q, k, v, o = map(torch.from_numpy, (of.q, of.k, of.v, of.o))
            k, v = ((x @ w).view(-1, KV_HEADS, HEAD_DIM) for w in (k, v))
            x = x + attend(x @ q, k, v, layer, batch) @ o
        return x @ torch.from_numpy(weights.head)
