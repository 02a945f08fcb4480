"""CUDA graphs of several widths.

A captured graph verifies a fixed number of rows per request, and most attention backends plan for one width. A server that has
only the widest graph pays for all its rows in every step. So a few widths are captured, each with its own attention backend, and
swapped per step, as in SGLang's adaptive EAGLE. Memory stays sized for the widest.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_context, get_exec, get_spec
from sglang.srt.utils.common import get_available_gpu_memory

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

logger = logging.getLogger(__name__)

CAPTURED_WIDTHS = (1, 4, 8, 16, 32)
# Beyond this many rows a step is bound by arithmetic on every card we know (ridge points: A100 153, H100 295, B200 281, L40S
# 419 rows in bfloat16), so that another row costs as much as the one before and a narrow width is better.
MOST_ROWS = 512


@dataclass(frozen=True, slots=True)
class _Captured:
    attention: AttentionBackend
    graphs: DecodeCudaGraphRunner


class WidthGraphs:
    """The decode graphs of a server by width. SGLang captures the widest at its start; the runner holds it."""

    def __init__(self, runner: ModelRunner, widest: int) -> None:
        self._runner = runner
        self.widths = (*(width for width in CAPTURED_WIDTHS if width < widest), widest)
        self._captured: dict[int, _Captured] = {}

    def capture(self) -> None:
        """Captures the other widths. Call it once, after SGLang has captured the widest."""
        for width in self.widths[:-1]:
            started, before = time.perf_counter(), self._free_memory()
            self._captured[width] = self._capture(width)
            logger.info(
                "specstore: captured graphs of width %d in %.1f s, %.2f GB",
                width,
                time.perf_counter() - started,
                before - self._free_memory(),
            )

    @contextlib.contextmanager
    def of_width(self, width: int) -> Iterator[None]:
        """The runner verifies `width` rows a request inside the block. Prefill keeps the backend that it was captured with."""
        captured = self._captured.get(width)
        if captured is None:
            yield
            return
        runner = self._runner
        own = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = captured.attention, captured.graphs
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = own

    def _capture(self, width: int) -> _Captured:
        with _configured_for(width):
            # The widths take turns, so they share the workspace.
            attention = self._runner._get_attention_backend(init_new_workspace=False)
            graphs = self._runner._decode_cuda_graph_runner_cls()(
                self._runner,
                attn_backend=attention,
                speculative_num_steps=get_spec().speculative_num_steps,
                speculative_num_draft_tokens=width,
            )
        return _Captured(attention, graphs)

    def _free_memory(self) -> float:
        return get_available_gpu_memory(self._runner.device, self._runner.gpu_id)


def captures_decode_graphs(device: str) -> bool:
    """Whether decode steps replay captured graphs. Several flags can switch them off."""
    return device != "cpu" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


def batch_sizes(width: int, captured: Sequence[int]) -> list[int]:
    """The captured batch sizes at which `width` is worth a graph. The smallest always is."""
    return [size for size in captured if size * width <= MOST_ROWS] or list(captured[:1])


@contextlib.contextmanager
def _configured_for(width: int) -> Iterator[None]:
    """Sets SGLang's configuration while backends and graphs of a width are made, and restores it."""
    before = {
        "speculative_num_draft_tokens": get_spec().speculative_num_draft_tokens,
        "speculative_num_steps": get_spec().speculative_num_steps,
    }
    decode = get_exec().graph.cuda_graph_config.decode
    captured = decode.bs, decode.max_bs
    sizes = batch_sizes(width, decode.bs)
    get_context().override(
        "specstore.width",
        speculative_num_draft_tokens=width,
        speculative_num_steps=max(1, width // get_spec().speculative_eagle_topk),
    )
    # In place: SGLang 0.5.17 reads them from `ServerArgs`, which holds the same object.
    decode.bs, decode.max_bs = sizes, max(sizes)
    try:
        yield
    finally:
        decode.bs, decode.max_bs = captured
        get_context().override("specstore.width", **before)
