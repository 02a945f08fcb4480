"""Real Llamas of a few thousand weights: small enough to count whole output distributions."""

from __future__ import annotations

import string
from pathlib import Path

VOCABULARY = 24
# Of the model that spells: what JSON needs, and one token a character.
CHARACTERS = string.ascii_lowercase + string.digits + ' .{}":,-'
SPELLING_VOCABULARY = 2 + len(CHARACTERS)
CONTEXT = 2048
SHARPNESS = 14.0  # scales the output weights, so that some continuations are likely enough to be accepted
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tiny_model(folder: Path) -> Path:
    """Saves a model that knows 24 words, and its tokenizer; deterministic."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _save_tokenizer(folder, tokenizer, bos_token="w0", eos_token="w1")
    return _save_model(folder, VOCABULARY)


def write_spelling_model(
    folder: Path, characters: str = CHARACTERS, vocabulary: int = 0, context: int = CONTEXT
) -> Path:
    """Saves a model whose tokens are characters: it can spell JSON. Deterministic. characters: in the order of their tokens.
    vocabulary: rows of its embedding, 0 for one a token. context: tokens that it can read."""
    write_spelling_tokenizer(folder, characters)
    return _save_model(folder, vocabulary or 2 + len(characters), context)


def write_spelling_tokenizer(folder: Path, characters: str = CHARACTERS) -> None:
    """Saves a tokenizer whose tokens are characters, in this order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {"<s>": 0, "</s>": 1}
    for character in characters:
        letters["Ġ" if character == " " else character] = len(
            letters
        )  # as byte-level tokenizers write a space
    tokenizer = Tokenizer(models.BPE(letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _save_tokenizer(folder, tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE)


def texts_of(folder: Path, count: int, length: int) -> list[list[int]]:
    """What the model says of its own accord, without special tokens: what is in a text is likely to come again in it. The same in
    every run."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    begins = torch.arange(2, 2 + count)[:, None]
    sizes = {"min_new_tokens": length - 1, "max_new_tokens": length - 1}
    model = LlamaForCausalLM.from_pretrained(folder)
    texts = model.generate(
        begins,
        attention_mask=torch.ones_like(begins),
        do_sample=True,
        top_k=0,
        suppress_tokens=[0, 1],
        **sizes,
    )
    return texts.tolist()


def _save_tokenizer(folder: Path, tokenizer, **settings: str) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)


def _save_model(folder: Path, vocabulary: int, context: int = CONTEXT) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPNESS)
    model.to(torch.float32).save_pretrained(folder)
    return folder
