import re
import threading

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Rejected, Status

ASK = Budget(nodes=8, depth=8, children=4)


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def step(engine, *args, **kwargs):
    return engine.step([Entry(*args, **kwargs)])[0]


def opened(text, name="s", engine=None, **opening):
    engine = engine or Engine(100)
    reply = step(engine, name, 0, ids(*text), opening=Opening(**opening))
    assert (reply.status, reply.known) == (Status.OK, len(text))
    return engine


def test_an_empty_session_and_an_unknown_context_draft_nothing():
    engine = Engine(100)
    assert len(step(engine, "s", budget=ASK, opening=Opening()).tree) == 0
    reply = step(engine, "s", 0, ids(1, 2, 3), budget=ASK)
    assert (reply.status, reply.known, len(reply.tree)) == (Status.OK, 3, 0)


def test_a_repeated_message_is_applied_once():
    engine = opened([1, 2, 3])
    for _ in range(3):
        assert step(engine, "s", 3, ids(4, 5)).known == 5
    assert step(engine, "s", 4, ids(5, 6)).known == 6
    expected = opened([1, 2, 3, 4, 5, 6])
    new = ids(1, 2)
    assert np.array_equal(
        step(engine, "s", 6, new, budget=ASK).tree.tokens, step(expected, "s", 6, new, budget=ASK).tree.tokens
    )


def test_a_gap_is_reported_and_changes_nothing():
    engine = opened([1, 2, 3])
    reply = step(engine, "s", 5, ids(9), budget=ASK)
    assert (reply.status, reply.known, len(reply.tree)) == (Status.GAP, 3, 0)
    assert step(engine, "s", 3).known == 3


def test_unknown_and_closed_sessions():
    engine = opened([1, 2])
    assert step(engine, "t", 0, ids(1)).status == Status.UNKNOWN_SESSION
    closing = step(engine, "s", 2, ids(1, 2, 1), budget=ASK, closing=True)
    assert (closing.status, closing.known) == (Status.OK, 5)
    assert len(closing.tree) > 0
    for name in ("s", "never"):
        unknown = step(engine, name, 5)
        assert (unknown.status, unknown.known, len(unknown.tree)) == (Status.UNKNOWN_SESSION, 0, 0)
    assert engine.stats().tiers[Tier.SESSION].tokens == 0


def test_opening_again_repeats_extends_or_replaces():
    engine = opened([1, 2, 3])
    assert step(engine, "s", 0, ids(1, 2), opening=Opening()).known == 3
    assert step(engine, "s", 0, ids(1, 2, 3, 4), opening=Opening()).known == 4
    assert step(engine, "s", 0, ids(7, 8), opening=Opening()).known == 2
    assert engine.stats().tiers[Tier.SESSION].tokens == 2


def test_one_session_twice_in_a_batch_is_applied_in_order():
    engine = Engine(100)
    replies = engine.step(
        [
            Entry("s", 0, ids(1, 2), opening=Opening()),
            Entry("s", 2, ids(3, 1, 2), budget=ASK),
            Entry("s", 5, closing=True),
            Entry("s", 5),
        ]
    )
    assert [reply.known for reply in replies] == [2, 5, 5, 0]
    assert replies[1].tree.tokens[0] == 3
    assert replies[3].status == Status.UNKNOWN_SESSION


def test_a_batch_answers_like_single_steps():
    rng = np.random.default_rng(0)
    prior = [build_segment([rng.integers(0, 8, 4000)], 100)]
    texts = [rng.integers(0, 8, 60).astype(np.int32) for _ in range(9)]
    entries = [Entry(f"s{i}", 0, text, budget=ASK, opening=Opening()) for i, text in enumerate(texts)]
    batched = Engine(100, prior).step(entries)
    single = [Engine(100, prior).step([entry])[0] for entry in entries]
    for ours, theirs in zip(batched, single, strict=True):
        for name in ("tokens", "parents", "probs", "sources"):
            assert np.array_equal(getattr(ours.tree, name), getattr(theirs.tree, name))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint16])
def test_any_integer_type_and_read_only_arrays_are_taken(dtype):
    tokens = np.array([1, 2, 3, 1, 2], dtype=dtype)
    tokens.flags.writeable = False
    reply = step(Engine(100), "s", 0, tokens, budget=ASK, opening=Opening())
    assert reply.tree.tokens[0] == 3


def test_the_largest_id():
    largest = (1 << 31) - 1
    engine = Engine(1 << 31, [build_segment([np.array([5, largest, largest, 6])], 1 << 31)])
    tree = step(engine, "s", 0, ids(5), budget=ASK, opening=Opening()).tree
    assert tree.tokens.tolist() == [largest, largest, 6]


def asked(*tokens):
    return Query(ids(*tokens), ASK)


BAD = {
    r"session: a name has 1 to 256 bytes": Entry(""),
    r"session: .* 'xxx": Entry("x" * 257),
    r"start: -1 is negative": Entry("s", -1),
    r"tokens: id 100 is outside \[0, 100\)": Entry("s", 0, ids(1, 100)),
    r"tokens: id -2 is outside": Entry("s", 0, ids(*range(50), -2)),
    r"tokens: 2-D": Entry("s", 0, ids(1, 2).reshape(1, 2)),
    r"tokens: 1-D float64": Entry("s", 0, np.array([0.5])),
    r"rejected.tokens: id 200": Entry("s", rejected=(Rejected(1, ids(200)),)),
    r"rejected.position: -1": Entry("s", rejected=(Rejected(-1, ids(1)),)),
    r"budget.nodes: 257 is outside 0..256": Entry("s", budget=Budget(257)),
    r"budget.nodes: -1": Entry("s", budget=Budget(-1)),
    r"budget.depth: 0 is outside 1..64": Entry("s", budget=Budget(4, depth=0)),
    r"budget.children: 0": Entry("s", budget=Budget(4, children=0)),
    r"queries.tokens: id 100 is outside \[0, 100\)": Entry("s", queries=(asked(1, 100),)),
    r"queries.tokens: 257 exceed 256": Entry("s", queries=(asked(*[1] * 257),)),
    r"queries.tokens: 2-D": Entry("s", queries=(Query(ids(1, 2).reshape(1, 2), ASK),)),
    r"queries.budget.nodes: 257 is outside 0..256": Entry("s", queries=(Query(ids(1), Budget(257)),)),
    r"queries: 4097 in one step exceed 4096": Entry("s", queries=(asked(1),) * 4097),
    r"opening.conversation": Entry("s", opening=Opening(conversation="c" * 300)),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_entry_is_refused_by_itself(message):
    engine = Engine(100)
    good = Entry("good", 0, ids(1, 2, 3, 1, 2), budget=ASK, opening=Opening(), queries=(asked(3),))
    first, bad, last = engine.step([good, BAD[message], Entry("last", 0, ids(1), opening=Opening())])
    assert (bad.status, bad.known, len(bad.tree)) == (Status.OVER_BUDGET, 0, 0)
    assert re.match(message, bad.refusal)
    assert [session.name for session in engine.sessions()] == ["good", "last"]
    (alone,) = Engine(100).step([good])
    assert first.tree.tokens.tolist() == alone.tree.tokens.tolist() != []
    assert [tree.tokens.tolist() for tree in first.trees] == [tree.tokens.tolist() for tree in alone.trees]
    assert (last.status, last.known, first.refusal, last.refusal) == (Status.OK, 1, "", "")


def test_a_step_of_too_many_queries_is_refused_before_anything_is_applied():
    engine, half = Engine(100), (asked(1),) * 2049
    with pytest.raises(ValueError, match="queries: 4098 in one step exceed 4096"):
        engine.step([Entry(name, opening=Opening(), queries=half) for name in "ab"])
    assert engine.sessions() == []


def test_limits_on_sessions_and_tokens():
    engine = Engine(100, limits=Limits(sessions=2, session_tokens=5, tokens=8))
    opened([1, 2, 3, 4], "a", engine)
    assert step(engine, "a", 4, ids(1, 2)).status == Status.OVER_BUDGET
    assert step(engine, "a", 4, ids(1)).known == 5
    over = step(engine, "b", 0, ids(1, 2, 3, 4), opening=Opening())
    assert (over.status, over.known) == (Status.OVER_BUDGET, 0)
    assert step(engine, "b", 0, ids(1, 2)).status == Status.OK
    assert step(engine, "c", 0, ids(1), opening=Opening()).status == Status.OVER_BUDGET
    step(engine, "a", closing=True)
    assert step(engine, "c", 0, ids(1), opening=Opening()).status == Status.OK


def test_text_is_asked_for_again_only_where_there_is_room_for_it():
    """A client sends all of a session in answer to UNKNOWN_SESSION, what is missing to GAP; it would do so in every step."""
    engine = Engine(100, limits=Limits(sessions=2, session_tokens=9, tokens=9))
    opened([1, 2], "a", engine)
    opened([1, 2], "b", engine)
    assert step(engine, "c", 5, ids(1)).status == Status.OVER_BUDGET
    assert step(engine, "a", 6, ids(1)).status == Status.GAP
    assert step(engine, "a", 6, ids(1, 2)).status == Status.OVER_BUDGET, "6 missing and 4 are above 9"
    step(engine, "b", closing=True)
    assert step(engine, "a", 6, ids(1, 2)).status == Status.GAP
    assert step(engine, "a", 6, ids(1, 2, 3, 4)).status == Status.OVER_BUDGET, "10 tokens of one session"
    assert step(engine, "c", 5, ids(1)).status == Status.UNKNOWN_SESSION


def test_conversation_text_is_found_again_and_positions_are_the_requests_own():
    engine = opened([1, 2, 3, 4], "a", conversation="talk")
    step(engine, "a", 4, ids(5), closing=True)
    assert engine.stats().conversations == 1
    reply = step(engine, "b", 0, ids(9, 1, 2), budget=ASK, opening=Opening(conversation="talk"))
    assert (reply.status, reply.known) == (Status.OK, 3)
    assert reply.tree.tokens.tolist()[:3] == [3, 4, 5]
    assert engine.stats().conversations == 0
    assert step(engine, "b", 3, ids(3, 4, 5)).known == 6


def test_a_conversation_that_goes_on_appends_only_the_rest():
    engine = opened([1, 2, 3], "a", conversation="talk")
    step(engine, "a", 3, closing=True)
    reply = step(engine, "b", 0, ids(1, 2, 3, 7), opening=Opening(conversation="talk"))
    assert reply.known == 4
    assert engine.stats().tiers[Tier.SESSION].tokens == 4


def test_a_conversation_is_moved_not_shared():
    engine = opened([1, 2, 3], "a", conversation="talk", publish=False)
    step(engine, "a", closing=True)
    step(engine, "b", 0, ids(9), opening=Opening(conversation="talk"))
    reply = step(engine, "c", 0, ids(1, 2), budget=ASK, opening=Opening(conversation="talk"))
    assert len(reply.tree) == 0


def test_a_step_that_waited_while_its_session_was_closed_leaves_the_conversation_alone(monkeypatch):
    """As when a worker connects anew and the old stream's last message is still being answered."""
    engine = opened([1, 2, 3], "a", conversation="talk")
    draft, find = engine._runner._draft, engine._sessions._find
    closing, found, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow_draft(*args):
        closing.set()
        assert go_on.wait(60)
        return draft(*args)

    def signalled_find(entries):
        sessions = find(entries)
        if closing.is_set():
            found.set()
        return sessions

    monkeypatch.setattr(engine._runner, "_draft", slow_draft)
    monkeypatch.setattr(engine._sessions, "_find", signalled_find)
    first = threading.Thread(target=lambda: step(engine, "a", 3, closing=True))
    first.start()
    assert closing.wait(60)
    replies = []
    second = threading.Thread(target=lambda: replies.append(step(engine, "a", 3, ids(9, 9))))
    second.start()
    assert found.wait(60)
    go_on.set()
    first.join(60)
    second.join(60)
    assert [reply.status for reply in replies] == [Status.UNKNOWN_SESSION]
    assert engine.stats().tiers[Tier.SESSION].tokens == 3


def test_conversations_are_bounded_by_count_bytes_and_age():
    for limits, kept in (
        (Limits(conversations=2), 2),
        (Limits(conversation_bytes=0), 0),
        (Limits(conversation_seconds=0), 0),
        (Limits(tokens=7, conversations=9), 2),
    ):
        engine = Engine(100, limits=limits)
        for number in range(4):
            opened([1, 2, 3], "s", engine, conversation=f"c{number}")
            step(engine, "s", closing=True)
        opened([1], "last", engine)
        engine.flush(session="last")
        opened([], "s", engine, conversation="c0")
        assert engine.stats().conversations <= kept, limits


def test_warmup_is_seen_by_the_next_step_and_flushed_by_tier():
    engine = opened([1, 2])
    engine.warmup([np.array([1, 2, 3]), np.array([], dtype=np.int64)])
    tree = step(engine, "s", 2, budget=ASK).tree
    assert (tree.tokens.tolist(), tree.sources.tolist()) == ([3], [Tier.LIVE])
    with pytest.raises(ValueError, match="id 100 is outside"):
        engine.warmup([np.array([100])])
    assert engine.stats().tiers[Tier.LIVE].segments == 1
    engine.flush(Tier.LIVE)
    assert len(step(engine, "s", 2, budget=ASK).tree) == 0


def test_flush_of_a_session_of_sessions_and_of_everything():
    prior = [build_segment([np.array([1, 2, 3])], 100)]
    engine = opened([1, 2], engine=Engine(100, prior))
    opened([1, 2], "t", engine)
    engine.flush(session="s")
    assert [session.name for session in engine.sessions()] == ["t"]
    with pytest.raises(ValueError, match="session"):
        engine.flush(Tier.PRIOR, "t")
    engine.flush()
    assert engine.sessions() == []
    assert engine.stats().tiers[Tier.PRIOR].tokens == 3
    engine.flush(Tier.PRIOR)
    assert engine.stats().tiers[Tier.PRIOR].segments == 0


@pytest.mark.parametrize("tier", [Tier.SESSION, None])
def test_a_session_that_is_flushed_during_its_last_step_is_not_acknowledged(monkeypatch, tier):
    engine = opened([1, 2])
    draft = engine._runner._draft

    def flushed(*args):
        engine.flush(tier)
        return draft(*args)

    monkeypatch.setattr(engine._runner, "_draft", flushed)
    reply = step(engine, "s", 2, np.array([3, 4]), closing=True)
    assert (reply.status, reply.known) == (Status.UNKNOWN_SESSION, 0)
    assert engine.stats().tiers[Tier.LIVE].tokens == 0


def test_a_prior_of_a_larger_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 200 exceeds"):
        Engine(100, [build_segment([], 200)])


def test_stats_count_drafts_hits_and_nodes_by_tier():
    engine = opened([1, 2, 3, 1, 2])
    tree = step(engine, "s", 5, budget=Budget(2, 2, 1)).tree
    stats = engine.stats()
    assert (stats.sessions, stats.drafts) == (1, 1)
    assert (stats.tiers[Tier.SESSION].hits, stats.tiers[Tier.SESSION].drafted) == (1, len(tree))
    assert stats.tiers[Tier.PRIOR].hits == 0


def test_streams_and_writers_at_once():
    """Threads step their own sessions while others replace the prior and warm the live tier: every answer stays the
    one that a lone engine gives for one of the published states, and no thread fails."""
    engine = Engine(100)
    text = np.tile(np.arange(10, dtype=np.int32), 30)
    priors = [[], [build_segment([np.arange(10)], 100)]]
    failures: list[BaseException] = []
    done = threading.Event()

    def stream(name):
        step(engine, name, 0, text[:20], opening=Opening())
        for at in range(20, len(text)):
            reply = step(engine, name, at, text[at : at + 1], budget=ASK)
            assert (reply.status, reply.known) == (Status.OK, at + 1)
            reply.tree.check_integrity(8, 8, 4)
            assert reply.tree.tokens[0] == (text[at] + 1) % 10

    def writer():
        while not done.is_set():
            for prior in priors:
                engine.set_prior(prior)
            engine.flush(Tier.LIVE)
            engine.warmup([text])

    def guarded(function, *args):
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 (reported by the assertion below)
            failures.append(error)

    streams = [threading.Thread(target=guarded, args=(stream, f"s{i}")) for i in range(4)]
    writing = threading.Thread(target=guarded, args=(writer,))
    for thread in [*streams, writing]:
        thread.start()
    for thread in streams:
        thread.join()
    done.set()
    writing.join()
    assert failures == []
