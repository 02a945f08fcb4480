"""Captured graphs as an attention backend sees them: SGLang's graph runner has one batch of each captured size, over the same buffers."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

OF_TOKENS = "input_ids", "positions", "out_cache_loc"
OF_REQUESTS = "req_pool_indices", "seq_lens", "seq_lens_cpu"


class Graphs:
    """sizes: requests of a captured batch. width: rows of each. of_mode: further fields of the captured batches."""

    def __init__(
        self,
        backend: AttentionBackend,
        translator: KVIndexTranslator,
        mode: ForwardMode,
        sizes: Collection[int],
        width: int = 1,
        **of_mode,
    ) -> None:
        self._backend, self._translator = backend, translator
        self._mode, self._width, self._of_mode = mode, width, of_mode
        self._fill = backend.get_cuda_graph_seq_len_fill_value()
        largest = max(sizes)
        self._buffers = {name: torch.zeros(largest * width, dtype=torch.int64) for name in OF_TOKENS}
        self._buffers |= {name: torch.zeros(largest, dtype=torch.int64) for name in OF_REQUESTS}
        backend.init_cuda_graph_state(largest, largest * width)
        self._captured = {size: self._capture(size) for size in sorted(sizes, reverse=True)}

    def _capture(self, size: int) -> tuple[ForwardBatch, object]:
        """A batch of nothing, and the tables that the captured kernels read from then on."""
        self._reset(0)
        batch = ForwardBatch(
            forward_mode=self._mode,
            batch_size=size,
            **{name: self._buffers[name][: size * self._width] for name in OF_TOKENS},
            **{name: self._buffers[name][:size] for name in OF_REQUESTS},
            seq_lens_sum=size * self._fill,
            **self._of_mode,
        )
        self._translator.bind_runner_slots(batch)
        self._backend.init_forward_metadata_out_graph(batch, in_capture=True)
        return batch, self._backend.forward_metadata

    def _reset(self, requests: int) -> None:
        """What is behind this many requests is padding. SGLang leaves its token ids as they are."""
        for name in OF_TOKENS[1:]:
            self._buffers[name][requests * self._width :] = 0
        for name in OF_REQUESTS:
            self._buffers[name][requests:] = 0 if name == "req_pool_indices" else self._fill

    def replay(self, live: ForwardBatch) -> ForwardBatch:
        """The captured batch of the next size, filled, and the backend's tables with it."""
        captured, tables = self._captured[min(size for size in self._captured if size >= live.batch_size)]
        self._reset(live.batch_size)
        for name in OF_TOKENS + OF_REQUESTS:
            rows = getattr(live, name)
            self._buffers[name][: len(rows)] = rows
        view = build_replay_fb_view(
            forward_batch=live,
            buffers=SimpleNamespace(**vars(captured)),
            bs=captured.batch_size,
            raw_bs=live.batch_size,
            num_tokens=captured.batch_size * self._width,
            global_num_tokens_cpu=None,
            seq_len_fill_value=self._fill,
            capture_forward_mode=self._mode,
            is_encoder_decoder=False,
        )
        self._backend.init_forward_metadata_out_graph(view)
        self._backend.init_forward_metadata_in_graph(captured)
        self._backend.forward_metadata = tables
        return captured
