"""How often choices come true, by the draft model's own probability of them."""

import numpy as np
import pytest

from sglang_patches.draft_side.draft import Candidates
from sglang_patches.methods.planner import Branches, ConfidenceRates, LikeliestOutcomes
from tests.unit.methods.saguaro.test_fan_out import make_draft

RANKS = 4
PRIOR = np.array([0.6, 0.2, 0.1, 0.05])
SURE, UNSURE = np.array([0.97, 0.02, 0.005, 0.002]), np.array([0.3, 0.25, 0.2, 0.1])


def test_what_is_not_seen_is_as_its_rank():
    assert ConfidenceRates(RANKS).rates(SURE, PRIOR) == pytest.approx(PRIOR)
    assert ConfidenceRates(RANKS).rates(SURE[:2], PRIOR[:2]) == pytest.approx(PRIOR[:2])


def test_the_draft_model_is_believed_as_far_as_it_is_right():
    """Sure of itself it is right in all cases, unsure in a third of them, and never by its other choices."""
    rates = ConfidenceRates(RANKS)
    for at in range(3000):
        rates.learn(SURE, 0)
        rates.learn(UNSURE, 0 if at % 3 == 0 else RANKS)
    assert rates.rates(SURE, PRIOR)[0] == pytest.approx(1, abs=0.02)
    assert rates.rates(UNSURE, PRIOR)[0] == pytest.approx(1 / 3, abs=0.03)
    assert (rates.rates(UNSURE, PRIOR)[1:] < 0.01).all()


def test_it_follows_what_changes():
    rates = ConfidenceRates(RANKS)
    for rank in (0, 1):
        for _ in range(20_000):
            rates.learn(UNSURE, rank)
    assert rates.rates(UNSURE, PRIOR)[:2] == pytest.approx([0, 1], abs=0.1)


def test_guesses_and_branches_use_what_was_learned():
    draft, predictor = make_draft([-1], [0]), LikeliestOutcomes()
    before = predictor.rates_of(draft.candidates[0])
    for _ in range(500):
        predictor.learn(draft, [], [101])  # the second choice after the root
    assert predictor.rates_of(draft.candidates[0])[1] > 0.9 > before[1]
    assert predictor.predict(draft, 1).guesses[0][:2] == (0, 101)
    grown = Branches(8, predictor.rates_of).grow(
        5, Candidates(np.arange(40, dtype=np.int32), np.full(40, 0.01))
    )
    assert [new.token for new in grown][:2] == [0, 1] and grown[1].probability > 0.9 > grown[0].probability
