"""Drafted tokens that came true, against a walk down the tree by its definition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.engine import Engine
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import DraftTree, Tier
from datastore_service.protocol.types import Budget, Entry, Opening

ASK = Budget(4, depth=4, children=1)


def walked(tree: DraftTree, text: list[int]) -> list[int]:
    """Tiers of the nodes, found child by child."""
    node, tiers = -1, []
    for token in text:
        children = [
            child for child in range(len(tree)) if tree.parents[child] == node and tree.tokens[child] == token
        ]
        if not children:
            break
        (node,) = children
        tiers.append(int(tree.sources[node]))
    return tiers


def accepted(engine: Engine) -> dict[Tier, int]:
    return {tier: stats.accepted for tier, stats in engine.stats().tiers.items() if stats.accepted}


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(1, 3)),
)
def test_counts_the_path_that_the_text_takes(text, following, budget):
    engine = Engine(3)
    opening = Entry("s", 0, np.array(text, np.int32), budget=Budget(*budget), opening=Opening())
    (reply,) = engine.step([opening])
    engine.step([Entry("s", len(text), np.array(following, np.int32))])
    expected = walked(reply.tree, following)
    assert accepted(engine) == {tier: expected.count(tier) for tier in Tier if tier in expected}


def step(engine: Engine, start: int, tokens: list[int], opening: Opening | None = None) -> list[int]:
    entry = Entry("s", start, np.array(tokens, np.int32), budget=ASK, opening=opening)
    (reply,) = engine.step([entry])
    return reply.tree.tokens.tolist()


def test_an_engine_counts_by_tier_what_its_sessions_went_on_with():
    engine = Engine(100, [build_segment([np.array([1, 2, 3, 4, 5, 6])], 100)])
    assert step(engine, 0, [1, 2], Opening()) == [3, 4, 5, 6]
    assert accepted(engine) == {}
    step(engine, 2, [3, 4, 9])
    assert accepted(engine) == {Tier.PRIOR: 2}
    step(engine, 2, [3, 4, 9])
    assert accepted(engine) == {Tier.PRIOR: 2}, "a repeated message brings nothing new"


def test_a_draft_counts_once_and_only_for_what_follows_it():
    engine = Engine(100, [build_segment([np.array([1, 2, 3, 4, 5, 6])], 100)])
    assert step(engine, 0, [1, 2], Opening()) == [3, 4, 5, 6]
    engine.step([Entry("s", 2, np.array([3], np.int32))])
    engine.step([Entry("s", 3, np.array([4], np.int32))])
    assert accepted(engine) == {Tier.PRIOR: 1}, "the second token came without a draft of its own"
