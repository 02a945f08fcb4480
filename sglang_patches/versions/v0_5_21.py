"""SGLang 0.5.21: as 0.5.22, but layers hand out no hidden states, and there is no watermark and no size of data-parallel attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_patches.versions import v0_5_22
from sglang_patches.versions.rows import changed, row
from sglang_patches.versions.v0_5_22 import ABORT, aborted, tree_walk

if TYPE_CHECKING:
    from sglang.srt.arg_groups.overrides import ResolvedView

__all__ = [
    "ABORT",
    "EARLY_EXITS",
    "ONLY_SUPPORTED",
    "ROWS",
    "aborted",
    "attention_is_data_parallel",
    "tree_walk",
]

EARLY_EXITS = False
ONLY_SUPPORTED: dict[str, object] = {}

ROWS = changed(
    v0_5_22.ROWS,
    row(
        "sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify",
        "target_worker batch accept_lens accept_index draft_token_num",
        "hybrid models",
    ),
    row(
        "sglang.srt.layers.sampler.Sampler.forward",
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
        "the target's own sampling, at every node",
    ),
    row(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc.__init__",
        "self loc swa_loc full_loc",
        "slots that a step writes",
    ),
    row("sglang.srt.server_args.ServerArgs.enable_dp_attention", None, "data-parallel attention is refused"),
    without=(
        "sglang.srt.models.llama.LlamaDecoderLayer.forward",
        "sglang.srt.runtime_context.attn_dp_enabled_of",
        "sglang.srt.server_args.ServerArgs.enable_watermark",
    ),
)


def attention_is_data_parallel(view: ResolvedView) -> bool:
    """Whether ranks share the attention by requests."""
    return view.enable_dp_attention
