"""SGLang's own argument resolution, on a machine of our choosing, for models that are a configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

from sglang.srt.arg_groups.overrides import ResolvedView, resolved_view
from sglang.srt.server_args import ServerArgs

from sglang_patches.host.versions import host
from tests.unit.plugin.platform import override_platform

_CARD = {"is_cuda": True, "has_flashinfer": True}
PLATFORMS = {
    "ampere": _CARD | {"device_sm": 80, "device_capability": (8, 0)},
    "hopper": _CARD
    | {"is_sm90": True, "is_hopper_with_cuda_12_3": True, "device_sm": 90, "device_capability": (9, 0)},
    "blackwell": _CARD
    | {
        "is_sm100": True,
        "is_sm100_or_sm110": True,
        "is_blackwell": True,
        "device_sm": 100,
        "device_capability": (10, 0),
    },
}

# Its linear-attention layers follow no tree links.
LIGHTNING = {"architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid"}
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "sliding window": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "attention sinks": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **_EXPERTS,
    },
    "MLA": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "first_k_dense_replace": 4,
        "num_key_value_heads": 8,
    },
    "hybrid": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}


def write_model(folder: Path, name: str) -> str:
    """A folder with the configuration of one of MODELS and no weights; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(_SIZES | (LIGHTNING if name == "lightning" else MODELS[name]))
    )
    return str(folder)


def server_args(model_path: str, platform: str, **given: object) -> ServerArgs:
    """The resolved arguments of a server on this platform. Raises what SGLang's resolution raises."""
    given = {"device": "cuda", "speculative_algorithm": "SSSD", "skip_tokenizer_init": True} | given
    with override_platform(**PLATFORMS[platform]):
        arguments = ServerArgs(model_path=model_path, **given)
        host.resolve(arguments)
        return arguments


def resolve(model_path: str, platform: str, **given: object) -> ResolvedView:
    """What SGLang decides for a server on this platform."""
    return resolved_view(server_args(model_path, platform, **given))
