"""The one outcome that DOUBLE drafts for."""

import numpy as np

from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import Guess
from sglang_patches.exchange.messages import GREEDY, Sampling
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import Trie
from sglang_patches.methods.double import AllAccepted

END = 9


def make_draft(nodes, sampling=GREEDY):
    """nodes: (number, parent, token), all verified."""
    draft = Draft("s", Text(np.zeros(4, np.int32)), sampling, Trie(4))
    draft.verify([draft.trie.add(*node, 0.5) for node in nodes])
    return draft


def know(draft, **choices):
    """n1=5: after node 1 the draft model's first choice is 5."""
    for node, token in choices.items():
        draft.candidates[int(node[1:])] = Candidates(np.array([token, 70], np.int32), np.array([0.75, 0.1]))


def test_the_target_follows_the_draft_models_choices_to_their_end():
    draft = make_draft([(1, 0, 5), (2, 1, 6), (3, 0, 7), (4, 3, 8)])
    know(draft, n0=5, n1=6, n2=42)
    assert AllAccepted().predict(draft, 24).guesses == [Guess(2, 42, 0.75)]


def test_what_the_draft_model_would_have_chosen_of_the_targets_retrieval_is_passed():
    draft = make_draft([(1, 0, 5), (2, 0, 7), (3, 2, 8)])
    know(draft, n0=7, n2=8, n3=42)
    assert AllAccepted().predict(draft, 24).guesses == [Guess(3, 42, 0.75)]


def test_a_choice_that_is_not_verified_ends_the_path():
    draft = make_draft([(1, 0, 5), (2, 1, 6)])
    know(draft, n0=3)
    assert AllAccepted().predict(draft, 24) == ([Guess(0, 3, 0.75)], {})


def test_what_may_still_lie_on_the_path_is_wanted_by_how_likely_it_does():
    """All of it at once where there is room, what the path surely comes to first where there is not."""
    draft = make_draft([(1, 0, 5), (2, 1, 6), (3, 2, 7), (4, 0, 8)])
    unknown = wanted(draft)
    assert unknown[0] == 1 > unknown[1] == unknown[4] > unknown[2] > unknown[3] > 0
    know(draft, n0=5)
    unknown = wanted(draft)
    assert set(unknown) == {1, 2, 3} and unknown[1] == 1 > unknown[2] > unknown[3]
    know(draft, n1=6, n2=7)
    assert wanted(draft) == {3: 1.0}
    know(draft, n3=1)
    assert wanted(draft) == {}


def wanted(draft):
    return AllAccepted().predict(draft, 24).unknown


def test_a_request_that_ends_has_no_next_draft():
    draft = make_draft([(1, 0, 5)], Sampling(1.0, 1, 1.0, 0.0, None, frozenset([END])))
    know(draft, n0=5, n1=END)
    assert AllAccepted().predict(draft, 24).guesses == []
