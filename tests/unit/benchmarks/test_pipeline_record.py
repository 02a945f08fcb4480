"""Recorded pairs: a draft that is the target itself has the target's answers as its first choices, noise included."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pipeline.models import answers, chooser
from benchmarks.pipeline.pairs import recorded

PROMPTS, SEEDS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3]], [11, 2**40, 13]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=300, eos_token_id=299, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= 20  # of some certainty
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_agrees_with_itself(model, temperature):
    found = answers(model, PROMPTS, temperature, SEEDS, 12)
    for prompt, answer, seed in zip(PROMPTS, found, SEEDS, strict=True):
        pair = recorded(prompt, answer, chooser(model, temperature, seed))
        assert len(pair) == 12 and (pair.ranks() == 0).all()
        other = recorded(prompt, answer, chooser(model, temperature, seed + 1))
        assert bool((other.ranks() == 0).all()) == (temperature == 0)  # the noise is another one
        assert bool((np.diff(pair.probabilities) <= 0).all()) == (temperature == 0)


def test_an_answer_ends_with_the_end_token(model):
    (whole,) = answers(model, PROMPTS[:1], 0.0, SEEDS[:1], 12)
    model.generation_config.eos_token_id = whole[4]
    (cut,) = answers(model, PROMPTS[:1], 0.0, SEEDS[:1], 12)
    model.generation_config.eos_token_id = 299
    assert cut == whole[: whole.index(whole[4]) + 1]
