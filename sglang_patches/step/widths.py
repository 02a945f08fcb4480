"""The widths that a server's steps may have, what chooses among them, and CUDA graphs of several widths."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_context, get_exec, get_spec
from sglang.srt.utils.common import get_available_gpu_memory

from sglang_patches.start.row_cost import measure_row_seconds
from sglang_patches.start.tree_attention import ANY_WIDTH_BACKENDS, verifying_backend
from sglang_patches.step.length import CANDIDATE_WIDTHS, LengthPolicy

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner


logger = logging.getLogger(__name__)
CAPTURED_WIDTHS = (1, 4, 8, 16, 32)
# Beyond this many rows a step is bound by arithmetic on every card we know (ridge points: A100 153, H100 295, B200 281, L40S
# 419 rows in bfloat16), so that another row costs as much as the one before and a narrow width is better.
MOST_ROWS = 512


class Widths(NamedTuple):
    """The widths that steps may have.

    values: ascending.
    most_rows: of a step with any width but the first.
    graphs: CUDA graphs of each width, None where none are captured.
    """

    values: tuple[int, ...]
    most_rows: float = math.inf
    graphs: WidthGraphs | None = None


def possible_widths(runner: ModelRunner, max_width: int, length: str, device: str) -> Widths:
    """The widths that this server can verify.

    length: the operator's option.
    """
    if length == "static":
        return Widths((max_width,))
    if captures_decode_graphs(device):
        graphs = WidthGraphs(runner, max_width)
        return Widths(graphs.widths, MOST_ROWS, graphs)
    if verifying_backend() in ANY_WIDTH_BACKENDS:
        return Widths((*(w for w in CANDIDATE_WIDTHS if w < max_width), max_width))
    return Widths((max_width,))


def length_policy(widths: Widths, runner: ModelRunner, device: str) -> LengthPolicy:
    """Times the target's linear layers where there is a choice."""
    if len(widths.values) == 1:
        return LengthPolicy(widths.values, lambda rows: 1.0)
    return LengthPolicy(
        widths.values,
        measure_row_seconds(runner.model, runner.dtype, device),
        widths.most_rows,
    )


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
