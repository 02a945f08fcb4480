"""SGLang 0.5.23."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_patches.versions.rows import row

if TYPE_CHECKING:
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

ABORT = "sglang.srt.managers.scheduler.Scheduler.send_abort_output"

EARLY_EXITS = True  # layers can be asked for their hidden states
ONLY_SUPPORTED = {"enable_watermark": False}  # fields -> the one value that all methods work with

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
    row(
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
        "target_worker batch accept_lens accept_index draft_token_num prepared_step_indices",
        "hybrid models",
    ),
    # A model whose layers have no `capture_output` is refused when it is loaded.
    row(
        "sglang.srt.models.llama.LlamaDecoderLayer.forward",
        "self positions hidden_states forward_batch capture_output",
        "hands out the hidden states in the middle of a forward",
    ),
    row(
        "sglang.srt.layers.sampler.Sampler.forward",
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions logprob_logits",
        "the target's own sampling, at every node",
    ),
    row(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc.__init__",
        "self loc swa_loc full_loc physical",
        "slots that a step writes",
    ),
    row("sglang.srt.runtime_context.attn_dp_enabled_of", "cfg", "data-parallel attention is refused"),
    row("sglang.srt.server_args.ServerArgs.enable_watermark", None, "is refused"),
)


def aborted(scheduler: Scheduler, abort_req: AbortReq, req: Req) -> Req:
    """The request that a call of `ABORT` ends."""
    return req


def attention_is_data_parallel(view: ResolvedView) -> bool:
    """Whether ranks share the attention by requests."""
    from sglang.srt.runtime_context import attn_dp_enabled_of

    return attn_dp_enabled_of(view)


def tree_walk() -> Callable:
    """The kernel that walks a verified tree."""
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    return verify_tree_greedy_func
