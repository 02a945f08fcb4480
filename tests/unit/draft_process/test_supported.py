"""Draft models that the draft process cannot run are refused by what they have, by the configuration as SGLang reads it."""

import pytest

pytest.importorskip("sglang")

from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from transformers import (  # noqa: E402
    DeepseekV2Config,
    FalconH1Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

from sglang_patches.draft_process.runner import refuse_unsupported  # noqa: E402

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
REFUSED = [
    ("DeepseekV2ForCausalLM", DeepseekV2Config(num_hidden_layers=2), "multi-head latent attention"),
    ("GptOssForCausalLM", GptOssConfig(num_hidden_layers=2), "a KV cache of its own for a sliding window"),
    ("FalconH1ForCausalLM", FalconH1Config(num_hidden_layers=2), "a recurrent state"),
    ("Qwen3NextForCausalLM", Qwen3NextConfig(num_hidden_layers=2), "a recurrent state"),
    ("LlamaForCausalLM", LlamaConfig(**SMALL, rope_scaling=MROPE), "positions in several dimensions"),
]


def config_of(folder, architecture: str, config: PretrainedConfig) -> ModelConfig:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return ModelConfig(str(folder), dtype="float32")


@pytest.mark.parametrize(("architecture", "config", "has"), REFUSED, ids=[row[0] for row in REFUSED])
def test_such_a_draft_model_is_refused_by_what_it_has(tmp_path, architecture, config, has):
    with pytest.raises(ValueError, match=f"--speculative-draft-model-path .*: a draft model with {has}"):
        refuse_unsupported(config_of(tmp_path, architecture, config))


def test_an_ordinary_one_is_not(tmp_path):
    refuse_unsupported(config_of(tmp_path, "LlamaForCausalLM", LlamaConfig(**SMALL)))
