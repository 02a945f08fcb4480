"""A tiny model with an MTP layer of its own, which SGLang's NEXTN drafts with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.tiny_model import CONTEXT, SHARPNESS, SPELLING_VOCABULARY, write_spelling_tokenizer

HIDDEN, LAYERS = 64, 2
_MTP = "model.mtp_layers.0."


def write_mtp_model(folder: Path) -> Path:
    """Saves a MiMo, which is a Qwen2 with an MTP layer; deterministic. Its MTP layer reads the embedding of the next
    token and is as the model's last layer, so it is right now and then."""
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=SPELLING_VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    model.save_pretrained(folder)
    write_spelling_tokenizer(folder)
    _add_mtp_layer(folder)
    return folder


def _add_mtp_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    last = f"model.layers.{LAYERS - 1}."
    weights |= {
        _MTP + name.removeprefix(last): weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    norm = weights["model.norm.weight"]
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{_MTP}{name}.weight"] = norm.clone()
    state, embedding = torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)
    weights[_MTP + "input_proj.weight"] = torch.cat([state, embedding], 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = folder / "config.json"
    about = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | about))
