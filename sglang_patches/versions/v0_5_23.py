"""SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_patches.versions.rows import row

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

ABORT = "sglang.srt.managers.scheduler.Scheduler.send_abort_output"

ROWS = (
    row(ABORT, "self abort_req req", "hooked: closes the session of a request that ends while it waits"),
    row(
        "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func",
        "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling "
        "target_predict topk",
        "walks the verified tree on an accelerator",
    ),
    row(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "self hidden_states lm_head embedding_bias out",
        "hooked on a CPU: fast path for few rows; timed at start",
    ),
    row(
        "sglang.srt.model_executor.forward_context.forward_context",
        "ctx forward_batch",
        "which backend serves the probe of tree attention",
    ),
)


def aborted(scheduler: Scheduler, abort_req: AbortReq, req: Req) -> Req:
    """The request that a call of `ABORT` ends."""
    return req


def tree_walk() -> Callable:
    """The kernel that walks a verified tree."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    return verify_tree_greedy_func
