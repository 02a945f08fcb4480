"""The rejected tier: what the target refused, by the context it was refused in."""

import dataclasses

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.fusion import CLASSES, FusionWeights
from datastore_service.engine.limits import Limits
from datastore_service.engine.segment import build_segment
from datastore_service.engine.session import SessionIndex
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Rejected

KEEPING = Limits(refusals=4096)
ASK = Budget(nodes=8, depth=4, children=8)
OFFERING = dataclasses.replace(
    FusionWeights(), trust_rejected=(0.3,) * CLASSES, keep=(0.1,) * CLASSES, floor=0.0
)


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def session(text, refused=(), prior=(), weights=OFFERING, limits=None, name="s"):
    """An engine with a session of that text. refused: (position, tokens) pairs."""
    engine = Engine(100, prior, weights=weights, limits=limits or KEEPING)
    rejected = tuple(Rejected(position, ids(*tokens)) for position, tokens in refused)
    engine.step([Entry(name, 0, ids(*text), rejected=rejected, opening=Opening(prompt_length=len(text)))])
    return engine


def draft(engine, text, name="s"):
    """Tokens after the root with their probability and tier."""
    (reply,) = engine.step([Entry(name, len(text), budget=ASK)])
    tree = reply.tree
    tree.check_integrity(ASK.nodes, ASK.depth, ASK.children)
    first = tree.parents < 0
    rows = zip(tree.tokens[first], tree.probs[first], tree.sources[first], strict=True)
    return {int(token): (float(prob), Tier(tier)) for token, prob, tier in rows}


TEXT = [7, 1, 2, 3, 8, 9, 1, 2]  # the context 1 2 occurred before position 3, where the target chose 3


def test_a_refused_token_is_offered_where_its_context_recurs():
    drafted = draft(session(TEXT, [(3, [5])]), TEXT)
    assert drafted[5][1] is Tier.REJECTED
    assert drafted[3][1] is Tier.SESSION
    assert drafted[3][0] > drafted[5][0] > 0


def test_it_is_not_offered_elsewhere():
    text = [*TEXT, 40]
    assert draft(session(text, [(3, [5])]), text) == {}
    assert 5 not in draft(session(TEXT, [(5, [5])]), TEXT)


def test_an_entry_of_one_token_is_enough_to_hit_and_has_no_continuation():
    engine = session(TEXT, [(3, [5])])
    (reply,) = engine.step([Entry("s", len(TEXT), budget=ASK)])
    place = reply.tree.tokens.tolist().index(5)
    assert place not in reply.tree.parents.tolist()


def test_what_was_refused_in_this_context_is_demoted_when_another_tier_proposes_it():
    prior = [build_segment([np.array([1, 2, 5, 6])], 100)]
    before = draft(session(TEXT, (), prior), TEXT)
    after = draft(session(TEXT, [(3, [5])], prior), TEXT)
    assert before[5][1] is after[5][1] is Tier.PRIOR
    assert after[5][0] < 0.2 * before[5][0]
    assert after[3] == before[3]


def test_weights_that_neither_offer_nor_demote_change_nothing():
    weights = dataclasses.replace(OFFERING, trust_rejected=(0.0,) * CLASSES, keep=(1.0,) * CLASSES)
    prior = [build_segment([np.array([1, 2, 5, 6])], 100)]
    refused = [(3, [5, 50])]
    plain = draft(session(TEXT, (), prior, weights), TEXT)
    told = draft(session(TEXT, refused, prior, weights), TEXT)
    assert {token: told[token] for token in plain} == plain
    assert all(told[token][0] == 0 for token in told.keys() - plain.keys())


def test_the_limit_turns_it_off_and_bounds_it():
    assert 5 not in draft(session(TEXT, [(3, [5])], limits=Limits()), TEXT)
    engine = session(TEXT, [(1, [50, 51]), (2, [52, 53]), (3, [5])], limits=Limits(refusals=4))
    assert engine.stats().tiers[Tier.REJECTED].tokens == 4
    assert 5 not in draft(engine, TEXT)
    with pytest.raises(ValueError, match="refusals: -1 is not at least 0"):
        Limits(refusals=-1)


def test_a_repeated_message_is_applied_once():
    engine = session(TEXT, [(3, [5])])
    engine.step([Entry("s", 0, ids(*TEXT), rejected=(Rejected(3, ids(5)), Rejected(2, ids(6))))])
    assert engine.stats().tiers[Tier.REJECTED].tokens == 1


def test_a_position_beyond_the_text_changes_nothing():
    assert session(TEXT, [(len(TEXT), [5])]).stats().tiers[Tier.REJECTED].tokens == 0


def test_it_is_counted_flushed_and_gone_with_its_session():
    engine = session(TEXT, [(3, [5])])
    rejected = engine.stats().tiers[Tier.REJECTED]
    assert (rejected.tokens, rejected.segments) == (1, 0) and rejected.nbytes > 0
    draft(engine, TEXT)
    assert engine.stats().tiers[Tier.REJECTED].hits == 1
    engine.flush(tier=Tier.REJECTED)
    assert engine.stats().tiers[Tier.REJECTED].tokens == 0
    assert 5 not in draft(engine, TEXT)
    engine = session(TEXT, [(3, [5])])
    engine.step([Entry("s", len(TEXT), closing=True)])
    engine.step([Entry("t", 0, ids(*TEXT), opening=Opening())])
    assert 5 not in draft(engine, TEXT, "t")


def test_it_does_not_outlive_the_request_in_a_conversation():
    engine = Engine(100, weights=OFFERING, limits=KEEPING)
    opening = Opening(conversation="c")
    engine.step([Entry("s", 0, ids(*TEXT), rejected=(Rejected(3, ids(5)),), opening=opening, closing=True)])
    engine.step([Entry("t", 0, ids(1, 2), opening=opening)])
    assert 5 not in draft(engine, [1, 2], "t")


def test_refusals_are_found_among_many():
    """A long text in which each context occurs twice; the first time, each token was followed by a refusal of its own."""
    rng = np.random.default_rng(0)
    words = [*rng.permutation(2000).tolist()] * 2
    index = SessionIndex()
    index.append(np.array(words[:2000], dtype=np.int32))
    for place in range(1, 2000):
        index.refuse(place, np.array([words[place] + 5000], dtype=np.int32), 4096)
    assert len(index.refused) == 1999
    engine = Engine(8000, weights=OFFERING, limits=KEEPING)
    rejected = tuple(Rejected(p, np.array([words[p] + 5000], np.int32)) for p in range(1, 2000))
    opening = Opening()
    engine.step([Entry("s", 0, np.array(words[:2000], np.int32), rejected=rejected, opening=opening)])
    for length in range(2010, 2100):
        tokens = np.array(words[length - 10 if length == 2010 else length - 1 : length], np.int32)
        engine.step([Entry("s", length - len(tokens), tokens)])
        assert words[length] + 5000 in draft(engine, words[:length])
