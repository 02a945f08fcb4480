"""What would follow tokens that are not committed: as if they were, and as if nobody had asked."""

import dataclasses
from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastore_service.engine.engine import Engine
from datastore_service.engine.fusion import CLASSES, MATCH_CLASSES, FusionWeights, Policy
from datastore_service.engine.limits import Limits
from datastore_service.engine.retrieval import MAX_MATCH
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import DraftTree, Tier
from datastore_service.protocol.types import NO_DRAFT, Budget, Entry, Opening, Query, Rejected, Reply, Status
from tests.unit.engine.oracles import match_length

ASK = Budget(nodes=8, depth=8, children=4)
LIMITS = Limits(refusals=100)
OFFERING = FusionWeights(trust_rejected=(0.3,) * CLASSES, keep=(0.1,) * CLASSES, floor=0.0)
PRIORITY = FusionWeights(policy=Policy.PRIORITY)
ONE = (1.0,) * CLASSES
CERTAIN = FusionWeights(trust_session=ONE, trust_prior=ONE, hold_session=ONE, doubt=0.0, floor=0.0, odds=1.0)

texts = st.lists(st.integers(0, 3), max_size=40)
suffixes = st.lists(st.integers(0, 3), max_size=12)
documents = st.lists(texts, max_size=2)
budgets = st.builds(Budget, st.sampled_from((0, 1, 3, 16, 64)), st.integers(1, 9), st.integers(1, 6))
questions = st.lists(st.tuples(suffixes, budgets), min_size=1, max_size=4)
refusals = st.lists(st.tuples(st.integers(0, 39), st.integers(0, 3)), max_size=6).map(sorted)


def ids(tokens) -> np.ndarray:
    return np.array(list(tokens), dtype=np.int32)


def query(tokens, budget: Budget = ASK) -> Query:
    return Query(ids(tokens), budget)


def plain(tree: DraftTree) -> tuple[list, ...]:
    return tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist(), tree.sources.tolist()


def told(reply: Reply) -> tuple:
    return reply.status, reply.known, plain(reply.tree), [plain(tree) for tree in reply.trees]


def step(engine: Engine, *args, **kwargs) -> Reply:
    return engine.step([Entry(*args, **kwargs)])[0]


def stocked(prior, live, weights=None) -> Engine:
    """An engine whose prior and live tier hold documents."""
    engine = Engine(16, [build_segment([ids(document) for document in prior], 16)], weights, LIMITS)
    for document in live:
        step(engine, "writer", tokens=ids(document), opening=Opening(), closing=True)
    engine.settle()
    return engine


def begin(engine: Engine, name: str, before, text, refused) -> None:
    """A session that goes on with the conversation `before`."""
    opening = Opening(conversation=name, publish=False)
    step(engine, "earlier", tokens=ids(before), opening=opening, closing=True)
    step(engine, name, tokens=ids(text), rejected=rejected(refused), opening=opening)


def rejected(refused) -> tuple[Rejected, ...]:
    return tuple(Rejected(position, ids([token])) for position, token in refused)


@pytest.mark.parametrize(
    "weights", [OFFERING, FusionWeights(), PRIORITY], ids=["rejected", "weighted", "priority"]
)
@settings(max_examples=60)
@given(documents, documents, texts, texts, suffixes, refusals, questions)
def test_the_answer_is_the_draft_of_a_session_with_that_text(
    weights, prior, live, before, text, new, refused, asked
):
    """Bit for bit, in every tier; what the entry itself commits counts."""
    refused = [(position, token) for position, token in refused if position < len(text)]
    engine, other = stocked(prior, live, weights), stocked(prior, live, weights)
    begin(engine, "s", before, text, refused)
    reply = step(engine, "s", len(text), ids(new), queries=tuple(query(*question) for question in asked))
    assert (reply.status, reply.known, len(reply.tree)) == (Status.OK, len(text + new), 0)
    for i, ((suffix, budget), tree) in enumerate(zip(asked, reply.trees, strict=True)):
        begin(other, f"t{i}", before, text, refused)
        real = step(other, f"t{i}", len(text), ids(new + suffix), budget=budget)
        assert plain(tree) == plain(real.tree)


@settings(max_examples=40)
@given(documents, texts, texts, st.lists(st.tuples(suffixes, questions), min_size=1, max_size=5))
def test_afterwards_all_is_as_if_nobody_had_asked(prior, before, text, steps):
    """Later drafts, what came true of them, the statistics, the sessions, the conversation and what is published."""
    asked_of, left_alone = stocked(prior, [], OFFERING), stocked(prior, [], OFFERING)
    known = len(text)
    for engine in (asked_of, left_alone):
        begin(engine, "s", before, text, [])
    for new, asked in steps:
        refused = rejected([(known, 3)] if new else [])
        entry = Entry("s", known, ids(new), refused, ASK)
        asking = dataclasses.replace(entry, queries=tuple(query(*question) for question in asked))
        (ours,), (theirs,) = asked_of.step([asking]), left_alone.step([entry])
        assert told(ours)[:3] == told(theirs)[:3]
        known += len(new)
        _check_alike(asked_of, left_alone)
    for engine in (asked_of, left_alone):
        step(engine, "s", known, closing=True)
        step(engine, "t", tokens=ids([1, 2]), opening=Opening("s", publish=True), closing=True)
    _check_alike(asked_of, left_alone)
    opening = Opening("s", publish=False)
    ours, theirs = (
        step(e, "u", tokens=ids(text[-3:]), budget=ASK, opening=opening) for e in (asked_of, left_alone)
    )
    assert told(ours) == told(theirs)


def _check_alike(ours: Engine, theirs: Engine) -> None:
    stats = [engine.stats() for engine in (ours, theirs)]
    assert stats[0].drafts == stats[1].drafts
    for tier in Tier:
        of_tier = [dataclasses.replace(each.tiers[tier], nbytes=0) for each in stats]
        assert of_tier[0] == of_tier[1]
    sessions = [[dataclasses.replace(s, nbytes=0) for s in engine.sessions()] for engine in (ours, theirs)]
    assert sessions[0] == sessions[1]


@given(st.lists(st.integers(0, 2), max_size=50), st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_matches_across_the_boundary_count_like_others(text, suffix):
    """Against brute force: with full trust the longest matches divide the probability by count."""
    whole = text + suffix
    engine = Engine(16, weights=CERTAIN)
    asked = query(suffix, Budget(40, 1, 40))
    (tree,) = step(engine, "s", tokens=ids(text), opening=Opening(), queries=(asked,)).trees
    lengths = {end: match_length(whole, end, whole, MAX_MATCH) for end in range(1, len(whole))}
    classes = {end: bisect_right(MATCH_CLASSES, match) for end, match in lengths.items() if match}
    best = [whole[end] for end, match_class in classes.items() if match_class == max(classes.values())]
    expected = {token: best.count(token) / len(best) for token in best}
    drafted = dict(zip(tree.tokens.tolist(), tree.probs.tolist(), strict=True))
    assert {token: prob for token, prob in drafted.items() if prob > 0} == pytest.approx(expected)


def test_a_match_that_begins_in_committed_text_goes_on_in_the_tentative_tokens():
    """The same suffix goes on as the text before it says: four tokens match instead of two."""
    documents = [ids([40, 41, 42, 43, 44]), ids([50, 51, 42, 43, 54])]
    engine = Engine(100, [build_segment(documents, 100)], CERTAIN)
    for before, likeliest in (([40, 41], 44), ([50, 51], 54)):
        opening, asked = Opening(publish=False), query([42, 43])
        reply = step(engine, "s", tokens=ids(before), opening=opening, queries=(asked,), closing=True)
        assert reply.trees[0].tokens[0] == likeliest


def test_a_tentative_text_is_continued_periodically():
    tree = step(Engine(100), "s", tokens=ids([9]), opening=Opening(), queries=(query([1, 2] * 4),)).trees[0]
    assert tree.tokens.tolist() == [1, 2] * 4


def test_many_queries_of_many_sessions_are_answered_in_order():
    rng = np.random.default_rng(0)
    entries, expected = [], []
    single = Engine(100)
    for name in "abcd":
        text = rng.integers(0, 5, 60).tolist()
        asked = [rng.integers(0, 5, size).tolist() for size in rng.integers(0, 9, 30 if name != "b" else 0)]
        entries.append(
            Entry(name, tokens=ids(text), budget=ASK, opening=Opening(), queries=tuple(map(query, asked)))
        )
        expected.append(
            [plain(step(single, "t", tokens=ids(text + a), budget=ASK, opening=Opening(publish=False), closing=True).tree) for a in asked]
        )  # fmt: skip
    replies = Engine(100).step(entries)
    assert [[plain(tree) for tree in reply.trees] for reply in replies] == expected
    repeated = Engine(100).step([*entries, *entries])
    assert [told(reply) for reply in repeated] == [told(reply) for reply in replies] * 2


def test_an_entry_that_is_not_applied_has_empty_answers():
    engine = Engine(100, limits=Limits(session_tokens=5))
    step(engine, "s", tokens=ids([1, 2, 1]), opening=Opening())
    unknown, gap, large, fine = (query([1]),), (query([1]), query([1])), (query([1]),), (query([2], ASK),)
    replies = engine.step(
        [Entry("x", queries=unknown), Entry("s", 4, queries=gap), Entry("s", 3, ids([1] * 9), queries=large),
         Entry("s", 3, queries=fine, closing=True)]
    )  # fmt: skip
    assert [reply.status.name for reply in replies] == ["UNKNOWN_SESSION", "GAP", "OVER_BUDGET", "OK"]
    assert [[len(tree) for tree in reply.trees] for reply in replies] == [[0], [0, 0], [0], [8]]
    assert engine.sessions() == []


def test_a_query_needs_no_room_in_the_session():
    engine = Engine(100, limits=Limits(session_tokens=5, tokens=5))
    reply = step(
        engine, "s", tokens=ids([1, 2, 1, 2, 1]), opening=Opening(), queries=(query([2] * 256), query([2]))
    )
    assert (reply.status, reply.known) == (Status.OK, 5)
    assert reply.trees[1].tokens[0] == 1
    assert engine.sessions()[0].tokens == 5


def test_a_query_with_no_nodes_and_one_of_no_text_are_empty():
    reply = step(Engine(100), "s", opening=Opening(), queries=(query([]), query([1, 1], NO_DRAFT)))
    assert [len(tree) for tree in reply.trees] == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [([8, 1], True), ([8, 1, 2], True), ([8], False), ([8, 2], False), ([], False), ([1, 2], False)],
)
def test_a_query_behind_what_is_known_is_answered_if_the_text_went_its_way(tokens, drafted):
    """Another stream has told two tokens more, 8 and 1, than the asking one knows of."""
    text = [1, 2, 3, 8, 1, 2, 3]
    engine = Engine(100)
    step(engine, "s", tokens=ids([*text, 8, 1]), opening=Opening())
    reply = step(engine, "s", 5, ids(text[5:]), queries=(query(tokens),))
    assert (reply.status, reply.known) == (Status.OK, 9)
    expected = step(Engine(100), "s", tokens=ids(text + tokens), budget=ASK, opening=Opening()).tree
    assert plain(reply.trees[0]) == (plain(expected) if drafted else ([], [], [], []))
    assert len(expected)
