"""Groups: what one session writes drafts for its siblings while it is open, and for no other."""

import time
from itertools import count

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.groups import LEAST_CAPACITY, MOST_BYTES, MOST_TEXTS, Groups, SiblingText
from datastore_service.engine.limits import Limits
from datastore_service.engine.provenance import Subject
from datastore_service.engine.session import LONGEST_GRAM, NOBODY
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Status
from tests.tenant_names import PAIRS

VOCAB = 100_000
PROMPT = np.arange(1000, 1016, dtype=np.int32)
OUTPUT = np.arange(2000, 2064, dtype=np.int32)
FOUND = OUTPUT[:4].tolist()
CHAIN = Budget(4, children=1)
SEEN = LONGEST_GRAM  # tokens of the prompt before what a sibling has written


@pytest.fixture
def engine():
    return Engine(VOCAB)


def begins(session, group="g", **said):
    opening = Opening(prompt_length=len(PROMPT), publish=False, group=group, **said)
    return Entry(session, 0, PROMPT, opening=opening)


def writes(session, text=OUTPUT[:6], start=0, **entry):
    return Entry(session, len(PROMPT) + start, text, **entry)


def asks(session):
    return Entry(session, len(PROMPT), budget=CHAIN)


def drafted(engine, *entries):
    replies = engine.step(entries)
    assert all(reply.status is Status.OK for reply in replies)
    return [reply.tree.tokens.tolist() for reply in replies]


def test_siblings_draft_for_each_other_while_they_are_written(engine):
    engine.step([begins("a"), begins("b"), begins("other", "h"), begins("none", "")])
    assert engine.stats().groups == 0
    engine.step([writes("a", OUTPUT[:2])])
    assert drafted(engine, asks("b"), asks("other"), asks("none")) == [OUTPUT[:2].tolist(), [], []]
    engine.step([writes("a", OUTPUT[2:6], 2)])
    (reply,) = engine.step([asks("b")])
    assert reply.tree.tokens.tolist() == FOUND and set(reply.tree.sources) == {Tier.LIVE}
    stats = engine.stats()
    assert stats.groups == 1 and stats.group_bytes > 0 and stats.tiers[Tier.LIVE].tokens == 0


@pytest.mark.parametrize("length", [6, LEAST_CAPACITY - SEEN - 1, LEAST_CAPACITY - SEEN])
def test_a_draft_ends_where_the_sibling_has_come_to(engine, length):
    output = np.arange(2000, 2000 + length, dtype=np.int32)
    engine.step([begins("a"), begins("b")])
    engine.step([writes("a", output), writes("b", output[:-2])])
    (reply,) = engine.step([Entry("b", len(PROMPT) + length - 2, budget=CHAIN)])
    assert reply.tree.tokens.tolist() == output[-2:].tolist()


def test_what_a_session_has_written_itself_counts_once(engine):
    """Its own text drafts as it would without a group, for its queries too."""
    text = np.tile(np.array([7, 8, 9, 7, 8, 5], dtype=np.int32), 5)
    query = Query(np.array([7, 8], dtype=np.int32), Budget(8))
    engine.step([begins("in"), begins("out", "")])
    engine.step([writes("in", text), writes("out", text)])
    entries = [
        Entry(name, len(PROMPT) + len(text), budget=Budget(8), queries=(query,)) for name in ("in", "out")
    ]
    replies = engine.step(entries)
    ours, theirs = ([reply.tree, *reply.trees] for reply in replies)
    assert len(ours[0].tokens) and len(ours[1].tokens)
    for our, their in zip(ours, theirs, strict=True):
        assert our.tokens.tolist() == their.tokens.tolist() and our.probs.tolist() == their.probs.tolist()
        assert set(our.sources) == set(their.sources) == {Tier.SESSION}


def test_a_text_stays_with_the_group_until_its_last_session_ends(engine):
    engine.step([begins("a"), begins("b")])
    engine.step([writes("a", closing=True), Entry("b", len(PROMPT))])
    assert drafted(engine, asks("b")) == [FOUND]
    engine.step([Entry("b", closing=True)])
    assert engine.stats().groups == 0
    engine.step([begins("c")])
    assert drafted(engine, asks("c")) == [[]]


@pytest.mark.parametrize("how", ["withheld", "flushed", "begun anew"])
def test_what_is_not_to_stay_leaves_with_its_session(engine, how):
    engine.step([begins("a"), begins("b"), writes("a")])
    assert drafted(engine, asks("b")) == [FOUND]
    if how == "flushed":
        engine.flush(session="a")
    elif how == "withheld":
        engine.step([Entry("a", closing=True, withheld=True)])
    else:
        engine.step([Entry("a", 0, OUTPUT, opening=Opening(group="h"))])
    assert drafted(engine, asks("b")) == [[]]


@pytest.mark.parametrize("pair", [pair for pair, names in PAIRS.items() if all(names)])
def test_names_that_look_alike_are_two_groups(engine, pair):
    one, other = PAIRS[pair]
    engine.step([begins("a", one), begins("b", one), begins("c", other), writes("a")])
    assert drafted(engine, asks("b"), asks("c")) == [FOUND, []]


@pytest.mark.parametrize("tier", [None, Tier.LIVE, Tier.SESSION, Tier.PRIOR])
def test_flushing_all_or_the_live_tier_forgets_what_groups_have_so_far(engine, tier):
    engine.step([begins("a"), begins("b"), writes("a")])
    engine.flush(tier)
    assert engine.stats().groups == (tier is Tier.PRIOR)
    if tier is Tier.LIVE:
        assert drafted(engine, asks("b")) == [[]]
        engine.step([writes("a", OUTPUT[6:12], 6), writes("b", OUTPUT[:8])])
        again = Entry("b", len(PROMPT) + 8, budget=CHAIN)
        assert drafted(engine, again) == [OUTPUT[8:12].tolist()], "what follows is written"


def test_a_session_of_a_forgotten_user_leaves_its_group(engine):
    engine.step([begins("a", user="ada"), begins("b", user="bob"), begins("c"), writes("a")])
    engine.forget([Subject.named("user", "ada")])
    engine.step([writes("a", OUTPUT[6:12], 6)])
    assert engine.stats().groups == 0 and drafted(engine, asks("c")) == [[]]
    engine.step([writes("b")])
    assert drafted(engine, asks("c")) == [FOUND]


def test_texts_of_ended_sessions_leave_when_they_have_their_greatest_age(monkeypatch):
    made = Engine(VOCAB, limits=Limits(live_seconds=100))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    made.step([begins("a"), begins("b"), writes("a", closing=True)])
    for now, found in ((1100.0, FOUND), (1101.0, [])):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        made.expire()
        assert drafted(made, asks("b")) == [found]


# The groups by themselves.


@pytest.fixture
def groups():
    return Groups(lambda: None)


owners = count(1)


def sibling(groups, written=(), group="g"):
    made = groups.join(group, next(owners), 0)
    groups.write(made, np.array(written, dtype=np.int32))
    return made


def test_a_text_grows_whole():
    changes = []
    groups, output = Groups(lambda: changes.append(1)), np.arange(5000, dtype=np.int32)
    one = groups.join("g", 1, 100)
    for length in range(90, len(output), 7):
        groups.write(one, output[:length])
    (text,) = groups.texts("g")
    assert text.tokens.tolist() == output[100 - SEEN : length].tolist() and text.owner == 1
    assert len(changes) <= 1 + np.log2(len(output) / LEAST_CAPACITY) + 1
    assert groups.nbytes == text.nbytes <= 120 * len(output)


def test_a_prompt_alone_is_not_written(groups):
    one = groups.join("g", 1, 20)
    for length in (10, 20):
        groups.write(one, np.arange(length, dtype=np.int32))
    assert "g" not in groups
    groups.write(one, np.arange(21, dtype=np.int32))
    assert "g" in groups


def test_the_oldest_text_of_an_ended_session_leaves_for_one_more_of_its_group(groups):
    siblings = [sibling(groups, [number]) for number in range(MOST_TEXTS)]
    late = sibling(groups, [MOST_TEXTS])
    assert len(groups.texts("g")) == MOST_TEXTS and late.text is None
    for ended in (siblings[5], siblings[3]):
        groups.leave(ended, keeps_text=True)
        assert ended.text.owner == NOBODY
    groups.write(late, np.array([MOST_TEXTS, 1], dtype=np.int32))
    texts = [text.tokens.tolist() for text in groups.texts("g")]
    assert texts[0] == [MOST_TEXTS, 1] and len(texts) == MOST_TEXTS
    assert [3] not in texts and [5] in texts, "the order is that of the texts"


def test_all_texts_together_have_a_bound():
    size = SiblingText(LEAST_CAPACITY, 1).nbytes
    groups = Groups(lambda: None, 3 * size)
    first, second, third = (sibling(groups, [1], name) for name in "abc")
    fourth = sibling(groups, [1], "d")
    assert fourth.text is None and groups.nbytes == 3 * size
    sibling(groups, group="b")  # keeps the group
    groups.leave(second, keeps_text=True)
    groups.write(fourth, np.array([1, 2], dtype=np.int32))
    assert "b" not in groups and fourth.text in groups.texts("d") and groups.nbytes == 3 * size
    groups.write(first, np.arange(2 * LEAST_CAPACITY, dtype=np.int32))
    assert len(first.text) == 1, "what does not fit is not written"
    groups.leave(third, keeps_text=True)
    groups.leave(fourth, keeps_text=True)
    groups.write(first, np.arange(LEAST_CAPACITY, dtype=np.int32))
    assert len(first.text) == LEAST_CAPACITY


def test_the_bound_is_counted_as_memory():
    assert Limits(sessions=1, session_tokens=1, tokens=1).most_bytes > MOST_BYTES


def test_a_session_that_was_flushed_during_its_step_writes_nothing(groups):
    one, other = sibling(groups), sibling(groups)
    groups.leave(one, keeps_text=False)
    groups.write(one, np.array([1, 2], dtype=np.int32))
    assert "g" not in groups
    groups.leave(other, keeps_text=True)
    assert not groups._siblings


@pytest.mark.parametrize("what", ["forgotten", "ended"])
def test_a_text_that_leaves_while_it_grows_stays_away(groups, monkeypatch, what):
    one = sibling(groups, [1])
    append = SiblingText.append

    def meanwhile(text, tokens):
        monkeypatch.undo()
        groups.clear() if what == "forgotten" else groups.leave(one, keeps_text=False)
        append(text, tokens)

    monkeypatch.setattr(SiblingText, "append", meanwhile)
    groups.write(one, np.arange(2 * LEAST_CAPACITY, dtype=np.int32))
    assert "g" not in groups and groups.nbytes == 0
