import threading
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.engine.batch import source_table
from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.live import compactor, fresh_writer, merge_policy
from datastore_service.engine.live.merge_policy import FRESH_TOKENS, MergePolicy
from datastore_service.engine.live.tier import LiveTier
from datastore_service.engine.provenance import Subject, provenance_of
from datastore_service.engine.retrieval import (
    CURSOR,
    FIRST_ROW,
    FRESH_WALK,
    MATCH,
    MAX_MATCH,
    MAX_SEGMENTS,
    OCCURRENCE_FIELDS,
    fresh_occurrences,
)
from datastore_service.engine.segment import build_segment
from datastore_service.engine.session import GRAMS, LEVELS, SEPARATOR, SessionIndex
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Status
from tests.live_text import documents_in
from tests.unit.engine.oracles import match_length, occurrences
from tests.waiting import eventually

documents_of_few_ids = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=5)
ASK = Budget(nodes=8, depth=8, children=4)


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


def fresh_text(documents):
    index = SessionIndex(1000)
    for document in documents:
        index.append(ids(*document, SEPARATOR))
    return index


def found(index, context):
    """{(document, position of the next token): match length}"""
    out = np.zeros((OCCURRENCE_FIELDS, 1000), dtype=np.int64)
    context = np.array(context, dtype=np.int64)
    table, count = source_table((index,), (), ()), 0
    for level in range(LEVELS - 1, -1, -1):
        if GRAMS[level] <= len(context):
            count = fresh_occurrences(
                table, FIRST_ROW, FIRST_ROW + 1, level, context, len(context), out, count
            )
    places = {}
    for cursor, match in zip(out[CURSOR, :count].tolist(), out[MATCH, :count].tolist(), strict=True):
        before = index.tokens[:cursor] == SEPARATOR
        document = int(before.sum())
        start = int(np.flatnonzero(before)[-1]) + 1 if document else 0
        places[document, cursor - start] = match
    assert len(places) == count
    return places


@given(documents_of_few_ids, st.lists(st.integers(0, 3), min_size=1, max_size=MAX_MATCH))
def test_fresh_text_is_found_like_the_oracle_finds_it(documents, context):
    expected = {}
    for number, start in occurrences(documents, context[-1:]):
        if start + 1 < len(documents[number]):
            match = match_length(documents[number], start + 1, context, MAX_MATCH)
            expected[number, start + 1] = match
    listed = found(fresh_text(documents), context)
    assert listed.items() <= expected.items()
    for longest, longer in zip(GRAMS, (*GRAMS[1:], MAX_MATCH + 1), strict=True):
        of_class = [place for place, match in expected.items() if longest <= match < longer]
        at_least = [place for place, match in expected.items() if match >= longest]
        if len(at_least) <= FRESH_WALK:  # none was skipped
            assert all(place in listed for place in of_class)


def output_of(engine, name, prompt, output, **opening):
    engine.step([Entry(name, 0, ids(*prompt), opening=Opening(prompt_length=len(prompt), **opening))])
    engine.step([Entry(name, len(prompt), ids(*output), closing=True)])


def drafted(engine, *context):
    (reply,) = engine.step([Entry("q", 0, ids(*context), budget=ASK, opening=Opening(publish=False))])
    engine.step([Entry("q", closing=True)])
    return reply.tree


def test_a_closed_session_s_output_is_proposed_by_the_next_query():
    engine = Engine(100)
    output_of(engine, "s", [50, 51], [1, 2, 3, 4])
    tree = drafted(engine, 9, 1, 2)
    assert (tree.tokens.tolist(), set(tree.sources)) == ([3, 4], {Tier.LIVE})
    assert len(drafted(engine, 50)) == 0  # the prompt is not the model's


def test_an_output_can_be_kept_back_and_flushed():
    engine = Engine(100)
    output_of(engine, "s", [], [1, 2, 3], publish=False)
    assert len(drafted(engine, 1, 2)) == 0
    output_of(engine, "s", [], [1, 2, 3])
    engine.flush(Tier.LIVE)
    assert len(drafted(engine, 1, 2)) == 0
    assert Engine(100, limits=Limits(live_tokens=0)).stats().tiers[Tier.LIVE].tokens == 0


def test_a_conversation_s_earlier_text_is_published_once():
    engine = Engine(100)
    output_of(engine, "a", [7], [1, 2, 3], conversation="talk")
    output_of(engine, "b", [7, 1, 2, 3, 8], [4], conversation="talk")
    assert engine.stats().tiers[Tier.LIVE].tokens == len([1, 2, 3, SEPARATOR, 4, SEPARATOR])


@pytest.fixture
def small_fresh_text(monkeypatch):
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 64)


def test_sealing_and_merging_keep_every_document_in_order(small_fresh_text):
    views = []
    tier = LiveTier(1000, 1 << 20, views.append)
    documents = [np.arange(i % 30 + 1, dtype=np.int32) + i for i in range(900)]
    for document in documents:
        tier.publish(document)
    tier.settle()
    assert documents_in(views[-1]) == [document.tolist() for document in documents]
    assert len(views[-1].segments) < 16
    assert len(views[-1].fresh) == 1


def test_a_merge_that_fails_loses_nothing_and_is_tried_again(small_fresh_text, monkeypatch, caplog):
    views = []
    tier = LiveTier(1000, 1 << 20, views.append)
    with monkeypatch.context() as broken:
        broken.setattr(compactor, "build_segment", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        for i in range(40):
            tier.publish(np.full(10, i, dtype=np.int32))
        tier.settle()
        assert tier.merge_failures > 0
        assert "a merge failed" in caplog.text
        assert documents_in(views[-1]) == [[i] * 10 for i in range(40)]
    tier.settle()
    assert documents_in(views[-1]) == [[i] * 10 for i in range(40)]
    assert len(views[-1].fresh) == 1


@pytest.fixture
def no_merges(small_fresh_text, monkeypatch):
    """Nothing is sealed while the event is not set, as during a long merge of another namespace."""
    monkeypatch.setattr(fresh_writer, "MOST_FRESH_TOKENS", 640)
    begun, go_on = threading.Event(), threading.Event()
    compactor._background.submit(lambda: begun.set() or go_on.wait())
    begun.wait()
    yield go_on
    go_on.set()


def test_what_is_published_faster_than_it_is_sorted_is_refused(no_merges, caplog):
    """Each step looks through what is not sorted, and its index is fifteen times as large."""
    engine = Engine(1000, limits=Limits(live_tokens=1 << 20))

    def publish(number):
        text = np.full(9, number, dtype=np.int32)
        (reply,) = engine.step([Entry("s", tokens=text, opening=Opening(), closing=True)])
        return reply.status

    statuses = [publish(number) for number in range(900)]
    kept = statuses.index(Status.OVER_BUDGET)
    assert 50 <= kept <= 77 and set(statuses[kept:]) == {Status.OVER_BUDGET}
    assert engine.stats().tiers[Tier.LIVE].tokens == 10 * kept
    assert compactor._background._work_queue.qsize() <= 1, "one run does all"
    no_merges.set()
    engine.settle()
    assert [publish(number) for number in range(7)] == [Status.OK] * 7
    assert documents_in(engine._live.view) == [[number] * 9 for number in (*range(kept), *range(7))]
    assert [record.message.count("not published") for record in caplog.records] == [1, 1]


def test_a_seal_that_failed_is_tried_again_when_text_is_refused(small_fresh_text, monkeypatch):
    monkeypatch.setattr(fresh_writer, "MOST_FRESH_TOKENS", 640)
    tier = LiveTier(1000, 1 << 20, lambda view: None)
    with monkeypatch.context() as broken:
        broken.setattr(compactor, "build_segment", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        while tier.publish(np.full(9, 1, dtype=np.int32)):
            pass
        tier.settle()
    assert len(tier.view.fresh) > 1
    tier.publish(np.full(9, 1, dtype=np.int32))
    eventually(lambda: tier.publish(np.full(9, 1, dtype=np.int32)), "it is never sealed")


def test_the_oldest_text_leaves_first(small_fresh_text):
    views = []
    tier = LiveTier(10_000, 1000, views.append)
    for i in range(1000):
        tier.publish(np.full(9, i, dtype=np.int32))
    tier.settle()
    kept = [document[0] for document in documents_in(views[-1])]
    assert kept == list(range(kept[0], 1000))
    assert 500 <= views[-1].tokens <= 1000


def test_a_flood_does_not_take_the_tier_over_its_limit(small_fresh_text, monkeypatch):
    """As much is published while a text is sealed as the seal takes away, so that the run has always more to do."""
    views = []
    tier = LiveTier(10_000, 1000, views.append)
    numbers = iter(range(700))

    def publish_one_text():
        for number in islice(numbers, 7):  # documents of a fresh text
            tier.publish(np.full(9, number, dtype=np.int32))

    def built_meanwhile(documents, vocab_size):
        publish_one_text()
        return build_segment(documents, vocab_size)

    monkeypatch.setattr(compactor, "build_segment", built_meanwhile)
    publish_one_text()
    publish_one_text()
    while len(tier.view.fresh) > 1:
        tier.settle()
    assert next(numbers, None) is None
    assert max(view.tokens for view in views) < 1500
    assert 500 <= views[-1].tokens <= 1000


def test_a_flood_of_one_tier_holds_up_no_other_and_no_call(small_fresh_text, monkeypatch):
    """A run does what was due when it began. While texts of the one tier are sorted, more of them are published."""
    monkeypatch.setattr(fresh_writer, "MOST_FRESH_TOKENS", 640)
    flooded, other = (LiveTier(10_000, 1 << 20, lambda view: None) for _ in range(2))
    sealed, flooding = [], threading.Event()
    flooding.set()

    def publish_texts(tier):
        for number in range(14):  # two fresh texts
            tier.publish(np.full(9, number, dtype=np.int32))

    def built_meanwhile(documents, vocab_size):
        sealed.append(len(documents))
        if len(sealed) == 3000:  # it has no end, or it held nobody up
            flooding.clear()
        if flooding.is_set():
            publish_texts(flooded)
        return build_segment(documents, vocab_size)

    monkeypatch.setattr(compactor, "build_segment", built_meanwhile)
    publish_texts(flooded)
    publish_texts(other)
    other.settle()
    assert len(other.view.fresh) == 1
    flooded.forget({Subject.named("user", "ada")})
    flooded.compact()
    assert flooding.is_set()
    flooding.clear()
    while len(flooded.view.fresh) > 1:
        flooded.settle()
    assert flooded.merge_failures == other.merge_failures == 0


def test_many_texts_that_wait_are_no_more_segments_than_a_step_can_search(no_merges, monkeypatch):
    monkeypatch.setattr(fresh_writer, "MOST_FRESH_TOKENS", 1 << 20)
    tier = LiveTier(10_000, 1 << 20, lambda view: None)
    for number in range(100):
        tier.publish(np.full(63, number, dtype=np.int32))
    assert len(tier.view.fresh) > MAX_SEGMENTS
    assert tier.forget({Subject.named("user", "ada")}) == []
    assert len(tier.view.fresh) == 1 and documents_in(tier.view) == [[number] * 63 for number in range(100)]


def test_the_oldest_of_texts_that_came_in_any_order_is_known():
    """Another service's text is taken behind one of this service that is younger."""
    now = 1000.0
    tier = LiveTier(10_000, 1 << 20, lambda view: None, max_age=100.0, clock=lambda: now)
    tier.publish(np.full(9, 1, dtype=np.int32))
    taken = provenance_of(Opening(), 910.0)
    taken["origin"], taken["number"] = 7, 1
    tier.take(np.full(9, 2, dtype=np.int32), taken)
    now = 1020.0
    tier.expire()
    tier.settle()
    assert documents_in(tier.view) == [[1] * 9]


def test_what_leaves_at_once_is_not_sorted(no_merges, monkeypatch):
    sorted_tokens = []
    monkeypatch.setattr(fresh_writer, "MOST_FRESH_TOKENS", 1 << 20)
    monkeypatch.setattr(
        compactor,
        "build_segment",
        lambda documents, size: (
            sorted_tokens.append(sum(map(len, documents))) or build_segment(documents, size)
        ),
    )
    tier = LiveTier(10_000, 1000, lambda view: None)
    for number in range(1000):
        tier.publish(np.full(9, number, dtype=np.int32))
    no_merges.set()
    tier.settle()
    assert sum(sorted_tokens) < 3 * 1000  # each token once for each size class


def test_text_that_comes_sorted_makes_the_oldest_leave():
    """No text is to be sealed or merged then."""
    tier = LiveTier(10_000, 1000, lambda view: None)
    for number in range(3):
        tier.warmup([np.full(599, number, dtype=np.int32)])
    assert documents_in(tier.view) == [[2] * 599]


def test_the_bytes_of_short_outputs_are_told():
    """The provenance of each takes more than its tokens."""
    engine = Engine(100)
    for number in range(10):
        output_of(engine, "s", [], [number, 1])
    fresh = engine.stats().tiers[Tier.LIVE].nbytes
    engine.compact()
    assert engine.stats().tiers[Tier.LIVE].nbytes >= 10 * (40 + 8) and fresh >= 10 * 40


def test_room_for_an_output_takes_a_part_of_what_was_warmed_up():
    engine = Engine(10_000, limits=Limits(live_tokens=1000))
    output_of(engine, "s", [], range(100))
    engine.warmup([np.full(49, number, dtype=np.int32) for number in range(19)])
    kept = [document[0] for document in documents_in(engine._live.view)[:-1]]
    assert kept == list(range(kept[0], 19)) and kept[0] <= 5
    assert engine.live_tokens <= 1000


def test_a_document_larger_than_a_fresh_text(small_fresh_text):
    engine = Engine(100)
    output_of(engine, "s", [], [*range(90), 1, 2, 5] * 3)
    assert drafted(engine, *range(80, 90), 1, 2, 5).tokens[0] == 0


def test_a_flush_during_a_merge_stays_flushed(small_fresh_text, monkeypatch):
    views = []
    tier = LiveTier(1000, 1 << 20, views.append)

    def flushed_meanwhile(documents, vocab_size):
        tier.clear()
        return build_segment(documents, vocab_size)

    monkeypatch.setattr(compactor, "build_segment", flushed_meanwhile)
    for i in range(20):
        tier.publish(np.full(20, i, dtype=np.int32))
    tier.settle()
    assert views[-1].segments == ()


def test_merge_policy_over_a_long_stream():
    """Few segments at any time, each token merged a few times, none merged above the largest size."""
    policy = MergePolicy(largest=1 << 22)
    sizes, written, merged, most = [], 0, 0, 0
    rng = np.random.default_rng(0)
    for _ in range(3000):
        size = int(FRESH_TOKENS * rng.uniform(0.9, 1))
        written += size
        sizes.append(size)
        while (run := policy.next_merge(sizes)) is not None:
            merged += sum(sizes[run])
            sizes[run] = [sum(sizes[run])]
        while sum(sizes) > 1 << 24:
            sizes.pop(0)
        most = max(most, len(sizes))
    assert most <= 18
    assert merged < 4 * written
    assert max(sizes) <= 1 << 22


@given(st.lists(st.integers(1, 1 << 24), max_size=MAX_SEGMENTS))
def test_merge_policy_bounds_the_segments_of_any_stream(arriving):
    policy = MergePolicy(largest=1 << 22)
    sizes = []
    for size in arriving:
        sizes.append(size)
        while (run := policy.next_merge(sizes)) is not None:
            assert run.stop - run.start >= 2
            sizes[run] = [sum(sizes[run])]
        assert len(sizes) <= 24
    assert sum(sizes) == sum(arriving)


def test_readers_beside_a_writer_see_whole_documents(small_fresh_text):
    """Every document counts up from its first token, so a draft across a border or of unwritten memory would show."""
    engine, asked = Engine(1 << 20), 0
    done = threading.Event()

    def write():
        for i in range(100_000):
            output_of(engine, "w", [], range(i % 97, i % 97 + 40))
            if i >= 1000 and asked > 50:
                break
        done.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    while not done.is_set():
        start = asked % 97
        tree = drafted(engine, start, start + 1)
        tree.check_integrity(8, 8, 4)
        assert tree.tokens.tolist() == list(range(start + 2, start + 2 + len(tree)))
        asked += 1
    writer.join()
    engine.settle()
    assert asked > 50
    assert len(drafted(engine, 5, 6)) == 8


def test_compact_joins_all_text_and_keeps_it_found():
    engine = Engine(500, limits=Limits(live_tokens=1 << 16))
    for first in (0, 100, 200):
        engine.warmup([np.arange(first, first + 100, dtype=np.int32)])
    output_of(engine, "a", (1, 2), range(300, 400))
    engine.compact()
    live_stats = engine.stats().tiers[Tier.LIVE]
    assert (live_stats.segments, live_stats.tokens) == (1, 400)
    for first in (50, 150, 250, 350):
        assert drafted(engine, first, first + 1).tokens[0] == first + 2
    output_of(engine, "b", (1, 2), range(400, 450))
    assert drafted(engine, 420, 421).tokens[0] == 422


@given(st.lists(st.integers(1, 60), max_size=20))
def test_compaction_ends_and_respects_the_largest_size(sizes):
    policy, rounds = MergePolicy(largest=100), 0
    while (run := policy.next_full_merge(sizes)) is not None:
        assert run.stop - run.start >= 2 and sum(sizes[run]) <= 100
        sizes = [*sizes[: run.start], sum(sizes[run]), *sizes[run.stop :]]
        rounds += 1
    assert rounds <= 20
    assert all(a + b > 100 for a, b in zip(sizes, sizes[1:], strict=False))
