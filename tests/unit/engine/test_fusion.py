import dataclasses
from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.engine import Engine
from datastore_service.engine.fusion import CLASSES, MATCH_CLASSES, FusionWeights, Policy
from datastore_service.engine.retrieval import MAX_MATCH
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening
from tests.unit.engine.oracles import match_length

ONE = (1.0,) * CLASSES
CERTAIN = dataclasses.replace(
    FusionWeights(),
    **{f"{kind}_{tier}": ONE for kind in ("trust", "hold") for tier in ("session", "live", "prior")},
    doubt=0.0,
    floor=0.0,
    odds=1.0,
)


def draft(text, budget, prior=(), weights=None, vocab_size=16):
    engine = Engine(vocab_size, prior, weights=weights)
    tokens = np.array(text, dtype=np.int32)
    return engine.step([Entry("s", 0, tokens, budget=budget, opening=Opening())])[0].tree


@given(
    st.lists(st.integers(0, 3), max_size=120),
    st.lists(st.lists(st.integers(0, 3), max_size=80), max_size=3),
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4)),
)
def test_every_tree_keeps_its_invariants_and_budget(text, documents, limits):
    budget = Budget(*limits)
    prior = [build_segment([np.array(d, dtype=np.int64) for d in documents], 16)]
    draft(text, budget, prior).check_integrity(*limits)
    tree = draft(text, budget, prior, FusionWeights(odds=1.0))
    tree.check_integrity(*limits)
    roots = tree.probs[tree.parents == -1]
    assert roots.sum() <= 1 + 1e-5
    for node in range(len(tree)):
        assert tree.probs[tree.parents == node].sum() <= tree.probs[node] + 1e-5
    assert (np.diff(tree.probs) <= 1e-6).all()  # best first


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_with_full_trust_the_longest_matches_divide_the_probability_by_count(text):
    tree = draft(text, Budget(40, 1, 40), weights=CERTAIN)
    lengths = {end: match_length(text, end, text, MAX_MATCH) for end in range(1, len(text))}
    classes = {end: bisect_right(MATCH_CLASSES, match) for end, match in lengths.items() if match}
    best = [text[end] for end, match_class in classes.items() if match_class == max(classes.values())]
    expected = {token: best.count(token) / len(best) for token in best}
    drafted = dict(zip(tree.tokens.tolist(), tree.probs.tolist(), strict=True))
    assert {token: prob for token, prob in drafted.items() if prob > 0} == pytest.approx(expected)


def test_count_ratios_of_one_match_length():
    tree = draft([1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2], Budget(8, 1, 8), weights=CERTAIN)
    drafted = dict(zip(tree.tokens.tolist(), tree.probs.tolist(), strict=True))
    assert drafted == pytest.approx({5: 2 / 3, 6: 1 / 3})


def test_a_periodic_text_is_continued_beyond_its_end():
    tree = draft([1, 2, 3] * 3, Budget(9, 9, 1))
    assert tree.tokens.tolist() == [1, 2, 3] * 3
    assert tree.parents.tolist() == list(range(-1, 8))


def test_a_longer_match_outweighs_more_frequent_short_ones():
    text = [5, 1, 2, 3, 4, 7, *[9, 3, 4, 8] * 3, 5, 1, 2, 3, 4]
    tree = draft(text, Budget(2, 1, 2))
    assert tree.tokens[0] == 7


def test_sources_name_the_tier():
    prior = [build_segment([np.array([4, 5, 6, 7])], 16)]
    tree = draft([6, 6, 4, 5], Budget(2, 2, 2), prior)
    assert (tree.tokens.tolist(), tree.sources.tolist()) == ([6, 7], [Tier.PRIOR] * 2)
    tree = draft([4, 5, 6, 4, 5], Budget(1, 1, 1))
    assert tree.sources.tolist() == [Tier.SESSION]


def test_a_continuation_ends_with_its_document():
    prior = [build_segment([np.array([1, 2, 3]), np.array([4, 5])], 16)]
    tree = draft([1, 2], Budget(8, 8, 8), prior)
    assert tree.tokens.tolist() == [3]


PRIORITY = FusionWeights(policy=Policy.PRIORITY)


def test_priority_drafts_the_text_after_the_longest_match_as_one_chain():
    text = [5, 1, 2, 7, 8, *[9, 2, 6] * 3, 5, 1, 2]
    tree = draft(text, Budget(4, 8, 4), weights=PRIORITY)
    assert tree.tokens.tolist() == [7, 8, 9, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    tree.check_integrity(4, 8, 4)


def test_priority_asks_the_tiers_in_doubles_order():
    prior = [build_segment([np.array([1, 2, 3, 11])], 16)]
    text = [1, 2, 3, 12, 1, 2, 3]
    assert draft(text, Budget(1), prior, PRIORITY).tokens.tolist() == [11]
    assert draft(text, Budget(1), (), PRIORITY).tokens.tolist() == [12]
    longer = [9, *text[:4], 9, *text[4:]]  # a match of four counts as one of three, the prior comes first
    assert draft(longer, Budget(1), prior, PRIORITY).tokens.tolist() == [11]
    short_prior = [build_segment([np.array([2, 3, 11])], 16)]
    assert draft(text, Budget(1), short_prior, PRIORITY).tokens.tolist() == [12]


@given(
    st.lists(st.integers(0, 3), max_size=120),
    st.lists(st.lists(st.integers(0, 3), max_size=80), max_size=3),
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4)),
)
def test_priority_trees_keep_invariants_and_budget(text, documents, limits):
    prior = [build_segment([np.array(d, dtype=np.int64) for d in documents], 16)]
    draft(text, Budget(*limits), prior, PRIORITY).check_integrity(*limits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trust_prior": (0.5,)}, "trust_prior: not"),
        ({"hold_live": (2.0,) * CLASSES}, "hold_live: not"),
        ({"doubt": -1.0}, "doubt"),
        ({"floor": 1.0}, "floor"),
        ({"odds": 0.0}, "odds"),
    ],
)
def test_weights_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        FusionWeights(**change)
