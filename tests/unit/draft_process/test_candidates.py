"""What a draft model goes on with: the target's own draw where both have the same logits."""

import numpy as np
import pytest
import torch

from sglang_patches.draft_process.model import COUNT, choose
from sglang_patches.exchange.messages import GREEDY, Sampling
from sglang_patches.verification.shared_noise import draw, filtered_probabilities

VOCABULARY = 500
SAMPLINGS = [
    GREEDY,
    Sampling(0.7, 1 << 30, 1.0, 0.0, 11),
    Sampling(1.0, 20, 0.9, 0.05, 12),
    Sampling(
        1.3, 1 << 30, 0.5, 0.0, None
    ),  # draws without noise that is shared: the likeliest is the best guess
]


@pytest.fixture
def logits():
    return torch.randn(len(SAMPLINGS), VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3


def test_the_first_choice_is_the_targets_draw(logits):
    for position in range(100, 140):
        found = choose(logits.clone(), SAMPLINGS, [position] * len(SAMPLINGS))
        for row, sampling in enumerate(SAMPLINGS):
            if sampling.noise is None:
                assert found[row].tokens[0] == logits[row].argmax()
                continue
            one = logits[row : row + 1]
            filters = [torch.tensor([value]) for value in (sampling.top_k, sampling.top_p, sampling.min_p)]
            target = filtered_probabilities(one, torch.tensor([sampling.temperature]), *filters)
            drawn = draw(target, torch.tensor([sampling.noise]), torch.tensor([position]))
            assert found[row].tokens[0] == drawn


def test_choices_without_noise_are_the_likeliest(logits):
    found = choose(logits.clone(), [GREEDY] * len(logits), [7] * len(logits))
    for row, candidates in enumerate(found):
        assert candidates.tokens.dtype == np.int32 and len(candidates.tokens) == COUNT
        assert candidates.tokens.tolist() == logits[row].argsort(descending=True)[:COUNT].tolist()
        assert candidates.probabilities[0] == pytest.approx(float(logits[row].softmax(-1).max()), rel=1e-5)


def test_a_row_does_not_depend_on_its_company(logits):
    together = choose(logits.clone(), SAMPLINGS, [9] * len(SAMPLINGS))
    for row, sampling in enumerate(SAMPLINGS):
        (alone,) = choose(logits[row : row + 1].clone(), [sampling], [9])
        assert alone.tokens[0] == together[row].tokens[0]
