"""SGLang 0.5.22: the scheduler sends an abort in many places, and all make its message with one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_patches.host.versions import v0_5_23
from sglang_patches.host.versions.rows import changed, row

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

ABORT = "sglang.srt.managers.scheduler._make_abort_req"

HEADS = False  # retrieval can stand beside a model's own head

ROWS = changed(
    v0_5_23.ROWS,
    row(ABORT, "req finished_reason", "hooked: closes the session of a request that ends while it waits"),
    row(
        "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func",
        "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling "
        "target_predict topk",
        "walks the verified tree on an accelerator",
    ),
    row(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "self hidden_states lm_head embedding_bias",
        "hooked on a CPU: fast path for few rows; timed at start",
    ),
    row(
        "sglang.srt.model_executor.forward_context.forward_context",
        "ctx",
        "which backend serves the probe of tree attention",
    ),
    without=(
        v0_5_23.ABORT,
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        *(each.path for each in v0_5_23.HEAD_ROWS),
    ),
)


def aborted(req: Req, finished_reason: object = None) -> Req:
    """The request that a call of `ABORT` ends."""
    return req


def tree_walk() -> Callable:
    """The kernel that walks a verified tree."""
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

    return verify_tree_greedy_func


def __getattr__(name: str) -> Any:
    """All else is as in 0.5.23."""
    return getattr(v0_5_23, name)
