"""Guesses of the planner while some of the verified nodes are not known to the draft model."""

from sglang_patches.drafting.planner import LikeliestOutcomes
from tests.unit.drafting.saguaro.test_fan_out import make_draft

BUDGET = 12


def tree(*unknown):
    """The draft model's first choices 1 and 2, and from elsewhere 3 after the root and 4 after it."""
    draft = make_draft([-1, 0, -1, 2], [0, 0, 9, 0])
    for node in unknown:
        del draft.candidates[node]
    return draft


def begin(draft, guesses):
    """As the draft side does it."""
    for parent, token, chance in guesses:
        node = draft.trie.add(draft.trie.next_node, parent, token, chance)
        draft.starts = draft.starts | {node: chance}


def test_with_all_known_the_likeliest_are_guessed_at_once():
    draft, predictor = tree(), LikeliestOutcomes()
    everything = predictor.guesses(draft, 1000)
    draft.starts = {}
    guesses = predictor.guesses(draft, BUDGET)
    chances = [guess.probability for guess in guesses]
    assert len(guesses) == BUDGET and chances == sorted(chances, reverse=True)
    assert chances == sorted((guess.probability for guess in everything), reverse=True)[:BUDGET]
    begin(draft, guesses)
    assert predictor.unknown_ends(draft) == [] == predictor.more(draft, 0)


def test_what_is_not_known_delays_nothing_and_is_wanted_by_how_likely_it_is():
    draft, predictor = tree(3, 4), LikeliestOutcomes()
    assert predictor.missing(draft) == []
    guesses = predictor.guesses(draft, BUDGET)
    assert {guess.parent for guess in guesses} <= {0, 1, 2} and 0 < len(guesses) <= BUDGET
    begin(draft, guesses)
    wanted = {leaf.node: leaf.value for leaf in predictor.unknown_ends(draft)}
    assert set(wanted) == {3, 4} and 0 < sum(wanted.values()) < 0.1  # 3 is the tenth choice after the root


def test_guesses_follow_when_an_end_becomes_known():
    whole, draft, predictor = tree(), tree(2), LikeliestOutcomes()
    first = predictor.guesses(draft, BUDGET)
    assert len(first) < BUDGET  # 2 is a likely end
    begin(draft, first)
    assert predictor.more(draft, BUDGET - len(first)) == []  # nothing has become known
    draft.candidates[2] = whole.candidates[2]
    second = predictor.more(draft, BUDGET - len(first))
    assert len(first) + len(second) == BUDGET and any(guess.parent == 2 for guess in second)
    begin(draft, second)
    assert len(draft.starts) == BUDGET and predictor.more(draft, 0) == []


def test_with_nothing_known_all_are_run_first():
    assert LikeliestOutcomes().missing(tree(0, 1, 2, 3, 4)) == [0, 1, 2, 3, 4]
