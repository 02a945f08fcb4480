"""SGLang's arguments of a draft model, made of those that its server was given.

What the operator says of the draft model holds as it stands. What is said of the target and not of the draft model is followed as
by SGLang's own draft models (its method STANDALONE). docs/settings.md has the verdict on each argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# The draft model's own arguments, and what a server that has it as its model calls them. They hold on any device.
OWN = {
    "speculative_draft_model_path": "model_path",
    "speculative_draft_model_revision": "revision",
    "speculative_draft_load_format": "load_format",
    "speculative_draft_model_quantization": "quantization",
    "speculative_draft_kv_cache_dtype": "kv_cache_dtype",
    "speculative_draft_attention_backend": "attention_backend",
    "speculative_moe_runner_backend": "moe_runner_backend",
    "decrypted_draft_config_file": "decrypted_config_file",
}
# The target's, followed on any device: what the files are and how they are read.
FOLLOWED = (
    "dtype",
    "trust_remote_code",
    "load_format",
    "model_loader_extra_config",
    "download_dir",
    "model_impl",
    "model_config_parser",
    "json_model_override_args",
    "weight_loader_disable_mmap",
    "weight_loader_prefetch_checkpoints",
    "weight_loader_prefetch_num_threads",
    "weight_loader_drop_cache_after_load",
)
# The target's, followed on a device of its kind alone: kernels, and the numbers that they take.
FOLLOWED_ON_ITS_KIND = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "sampling_backend",
    "moe_runner_backend",
    "flashinfer_mxfp4_moe_precision",
    "kv_cache_dtype",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
    "bf16_gemm_backend",
    "enable_fp32_lm_head",
    "enable_tf32_matmul",
    "enable_fused_qk_norm_rope",
    "enable_lean_attention",
    "triton_attention_reduce_in_fp32",
    "triton_attention_num_kv_splits",
    "triton_attention_split_tile_size",
    "disable_flashinfer_autotune",
    "flashinfer_autotune_skip_ops",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
    "disable_prefill_cuda_graph",
    "disable_cuda_graph_padding",
    "cuda_graph_backend_decode",
    "cuda_graph_backend_prefill",
    "debug_cuda_graph",
    "enable_profile_cuda_graph",
    "enable_cudagraph_gc",
    "enable_torch_compile",
    "enable_torch_compile_debug_mode",
)
# As these, for a checkpoint that is not quantised already.
QUANTIZATION = "quantization"
_OF_A_PHASE = ("prefill_attention_backend", "decode_attention_backend")


def given_of(server_args: ServerArgs) -> dict[str, object]:
    """What the operator has given, by field: SGLang fills in and changes others itself."""
    from sglang.srt.server_args import ServerArgs

    defaults = inspect.signature(ServerArgs).parameters
    raw = server_args._raw_input
    return {field: value for field, value in raw.items() if value != defaults[field].default}


def draft_arguments(given: Mapping[str, object], same_kind: bool) -> dict[str, object]:
    """The arguments of the draft model's server, by field.

    given: what the operator has given, by field.
    same_kind: whether the draft model's device is of the target's kind.
    """
    followed = _picked(given, FOLLOWED + (FOLLOWED_ON_ITS_KIND if same_kind else ()))
    own = {OWN[field]: value for field, value in _picked(given, OWN).items()}
    if "attention_backend" in own:
        followed = {field: value for field, value in followed.items() if field not in _OF_A_PHASE}
    return followed | own


def followed_quantization(given: Mapping[str, object], same_kind: bool) -> str:
    """The target's, for a checkpoint that is not quantised; "" for none."""
    follows = same_kind and "speculative_draft_model_quantization" not in given
    return str(given.get(QUANTIZATION, "")) if follows else ""


def refuse_target_s_source(given: Mapping[str, object]) -> None:
    """Raises ValueError for weights that come from where the target's are alone."""
    if given.get("load_format") == "remote_instance" and "speculative_draft_load_format" not in given:
        raise ValueError(
            "--load-format remote_instance brings the target's weights: give --speculative-draft-load-format for the draft model's"
        )


def _picked(given: Mapping[str, object], fields: Iterable[str]) -> dict[str, object]:
    return {field: given[field] for field in fields if field in given}
