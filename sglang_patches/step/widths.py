"""Which widths a server's steps may have, and what chooses among them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from sglang_patches.start.row_cost import measure_row_seconds
from sglang_patches.start.tree_attention import ANY_WIDTH_BACKENDS, verifying_backend
from sglang_patches.step.length import CANDIDATE_WIDTHS, LengthPolicy
from sglang_patches.step.width_graphs import MOST_ROWS, WidthGraphs, captures_decode_graphs

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


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
        widths.values, measure_row_seconds(runner.model, runner.dtype, device), widths.most_rows
    )
