"""A real Llama of a few thousand weights with a vocabulary of 24: small enough to count whole output distributions."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 24
SHARPNESS = 14.0  # scales the output weights, so that some continuations are likely enough to be accepted


def write_tiny_model(folder: Path) -> Path:
    """Saves model and tokenizer; deterministic."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    model.to(torch.float32).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1").save_pretrained(
        folder
    )
    return folder
