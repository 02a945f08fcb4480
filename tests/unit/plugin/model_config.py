"""The configuration of a small Llama: what SGLang reads of a model when it resolves its arguments."""

import json
from pathlib import Path


def write_config(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 24,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
