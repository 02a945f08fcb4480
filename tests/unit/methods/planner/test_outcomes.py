"""Guesses of the planner while some of the verified nodes are not known to the draft model."""

import pytest

from sglang_patches.methods.planner import LikeliestOutcomes
from sglang_patches.methods.saguaro import GeometricFanOut
from tests.unit.methods.saguaro.test_fan_out import make_draft

BUDGET = 12


def tree(*unknown):
    """The draft model's first choices 1 and 2, and from elsewhere 3 after the root and 4 after it."""
    draft = make_draft([-1, 0, -1, 2], [0, 0, 9, 0])
    for node in unknown:
        del draft.candidates[node]
    return draft


def test_with_all_known_the_likeliest_are_guessed_at_once():
    draft, predictor = tree(), LikeliestOutcomes()
    everything = predictor.predict(draft, 1000).guesses
    guesses, unknown = predictor.predict(draft, BUDGET)
    chances = [guess.probability for guess in guesses]
    assert len(guesses) == BUDGET and chances == sorted(chances, reverse=True)
    assert chances == sorted((guess.probability for guess in everything), reverse=True)[:BUDGET]
    assert unknown == {}


def test_what_is_not_known_delays_nothing_and_is_wanted_by_how_likely_it_is():
    guesses, unknown = LikeliestOutcomes().predict(tree(3, 4), BUDGET)
    assert {guess.parent for guess in guesses} <= {0, 1, 2} and 0 < len(guesses) <= BUDGET
    assert set(unknown) == {3, 4} and 0 < sum(unknown.values()) < 0.1  # 3 is the tenth choice after the root


@pytest.mark.parametrize("method", [LikeliestOutcomes, GeometricFanOut])
def test_more_is_guessed_when_an_end_becomes_known(method):
    whole, draft, predictor = tree(), tree(2), method()
    first, basis = predictor.predict(draft, BUDGET).guesses, predictor.basis(draft)
    assert len(first) < BUDGET  # 2 is a likely end
    draft.candidates[2] = whole.candidates[2]
    assert predictor.basis(draft) != basis
    second = predictor.predict(draft, BUDGET).guesses
    assert len(second) == BUDGET and any(guess.parent == 2 for guess in second)


@pytest.mark.parametrize("method", [LikeliestOutcomes, GeometricFanOut])
def test_the_likeliest_end_is_wanted_first_where_nothing_is_known(method):
    guesses, unknown = method().predict(tree(0, 1, 2, 3, 4), BUDGET)
    assert guesses == [] and set(unknown) == {0, 1, 2, 3, 4}
    assert unknown[0] == 1 > max(unknown[1], unknown[3])
