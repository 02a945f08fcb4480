"""Forgetting a subject, and text that has its greatest age: in sessions, conversations and a live tier without a disk."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.live import merge_policy
from datastore_service.engine.live.tier import LiveTier
from datastore_service.engine.provenance import Subject, subjects_of
from datastore_service.engine.workspaces import LEAST_TOKENS
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Entry, Opening, Status
from tests.live_text import documents_in, documents_of
from tests.unit.engine.test_engine import ASK, ids, opened, step
from tests.unit.engine.test_workspaces import FILE, FOUND, asks, drafted, reads

ADA = Subject.named("user", "ada")


@pytest.fixture
def small_fresh_text(monkeypatch):
    monkeypatch.setattr(merge_policy, "FRESH_TOKENS", 64)


def publish(engine, number, **opening):
    step(engine, "p", 0, ids(*[number] * 9), opening=Opening(**opening), closing=True)


def test_the_text_of_a_user_or_a_conversation_leaves_and_no_other(small_fresh_text):
    engine = Engine(100)
    for number in range(60):
        publish(engine, number, user=f"u{number % 5}", conversation=f"c{number % 7}")
        engine.settle()  # some of it sealed, some of it merged, some fresh
    engine.warmup([ids(90, 91, 92)])
    subjects = [Subject.named("user", "u1"), Subject.named("conversation", "c2")]
    kept = [[n] * 9 for n in range(60) if n % 5 != 1 and n % 7 != 2] + [[90, 91, 92]]
    removed = engine.forget(subjects)
    assert {text[0] for text in removed} == {n for n in range(60) if n % 5 == 1 or n % 7 == 2}
    assert sorted(documents_of(engine)) == sorted(kept)
    assert engine.search(subjects, removed).documents == 0
    assert engine.forget(subjects) == [], "again"
    publish(engine, 1, user="u1")
    assert engine.search(subjects, []).documents == 1, "it may be published anew"


def test_a_conversation_is_a_subject_of_another_kind_than_a_user_of_its_name():
    engine = Engine(100)
    publish(engine, 7, conversation="ada")
    publish(engine, 8)
    assert engine.forget([ADA, Subject.named("user", "")]) == []
    assert len(documents_of(engine)) == 2
    assert subjects_of(Opening()) == frozenset()
    assert Subject.parse(str(ADA)) == ADA


def test_a_conversation_with_the_users_text_is_forgotten():
    engine = opened([1, 2, 3], "a", conversation="talk", user="ada")
    step(engine, "a", closing=True)
    opened([4, 5, 6], "b", engine, conversation="other", user="bob")
    step(engine, "b", closing=True)
    engine.forget([ADA])
    assert engine.stats().conversations == 1
    assert len(step(engine, "c", 0, ids(1, 2), budget=ASK, opening=Opening(conversation="talk")).tree) == 0


def test_an_open_session_of_the_user_goes_on_and_leaves_nothing():
    engine = opened([1, 2, 3], "a", conversation="talk", user="ada")
    engine.forget([ADA])
    assert step(engine, "a", 3, ids(1, 2), budget=ASK).tree.tokens.tolist()[:3] == [3, 1, 2]
    again = Opening(conversation="talk", user="ada")
    assert step(engine, "a", 0, ids(1, 2, 3, 1, 2), opening=again).status is Status.OK, "its reply was lost"
    assert step(engine, "a", 5, closing=True).status is Status.OK
    assert (engine.stats().conversations, documents_of(engine)) == (0, [])


def test_anothers_session_that_began_with_the_users_text_is_unknown():
    """Its worker sends what is its own again."""
    engine = opened([1, 2, 3], "a", conversation="talk", user="ada")
    step(engine, "a", closing=True)
    opened([9], "b", engine, conversation="talk", user="bob")
    engine.forget([ADA])
    assert step(engine, "b", 1, ids(1)).status is Status.UNKNOWN_SESSION
    assert engine.stats().tiers[Tier.SESSION].tokens == 0


def test_all_workspaces_are_emptied_and_may_be_filled_again():
    """What a workspace has of whom is not noted."""
    engine = Engine(100_000, limits=Limits(workspace_tokens=LEAST_TOKENS))
    engine.step([reads("a", session="1"), reads("b", session="2")])
    engine.forget([ADA])
    assert not engine.has_workspace("a") and not engine.has_workspace("b")
    assert drafted(engine, asks("a")) == [[]]
    engine.step([reads("a")])
    assert drafted(engine, asks("a")) == [FOUND]


@pytest.mark.parametrize("user", ["ada", "bob"])
def test_an_open_session_of_the_user_adds_nothing_to_its_workspace(user):
    engine = Engine(100_000, limits=Limits(workspace_tokens=LEAST_TOKENS))
    said = reads("project", session="s")
    said.opening, said.closing = replace(said.opening, user=user), False
    engine.step([said])
    engine.forget([ADA])
    engine.step([Entry("s", len(FILE), closing=True)])
    assert engine.has_workspace("project") == (user == "bob")


def test_text_that_is_being_added_to_a_workspace_is_forgotten_too(monkeypatch):
    """The session is closed already, and its text is not in the workspace yet."""
    engine = Engine(100_000, limits=Limits(workspace_tokens=LEAST_TOKENS))
    said = reads("project", session="s")
    said.opening, said.closing = replace(said.opening, user="ada"), False
    engine.step([said])
    session, workspaces = engine._sessions._open["s"], engine._texts.workspaces
    add, waited, adding = workspaces.add, threading.Event(), threading.Event()
    session.lock = Waited(session.lock, waited)

    def late(*args):
        adding.set()
        assert waited.wait(60), "nobody waits for the step that adds"
        add(*args)

    monkeypatch.setattr(workspaces, "add", late)
    closing = threading.Thread(target=lambda: step(engine, "s", len(FILE), closing=True))
    closing.start()
    assert adding.wait(60)
    engine.forget([ADA])
    closing.join(60)
    assert not engine.has_workspace("project")


class Waited:
    """A lock that says when somebody waits for it."""

    def __init__(self, lock, waited):
        self.lock, self.waited = lock, waited
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self):
        self.waited.set()
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_an_output_that_is_being_published_is_forgotten_too(monkeypatch):
    """The session is closed already, and its text is not in the live tier yet."""
    engine = opened([], "a", user="ada")
    session = engine._sessions._open["a"]
    publish, waited, publishing = engine._runner._publish, threading.Event(), threading.Event()
    session.lock = Waited(session.lock, waited)

    def late(*args):
        publishing.set()
        assert waited.wait(60), "nobody waits for the step that publishes"
        return publish(*args)

    monkeypatch.setattr(engine._runner, "_publish", late)
    closing = threading.Thread(target=lambda: step(engine, "a", 0, ids(1, 2, 3), closing=True))
    closing.start()
    assert publishing.wait(60)
    removed = engine.forget([ADA])
    closing.join(60)
    assert [text.tolist() for text in removed] == [[1, 2, 3]]
    assert documents_of(engine) == []


def test_two_that_forget_at_a_time_both_do(small_fresh_text):
    engine = Engine(100)
    for number in range(60):
        publish(engine, number, user=f"u{number % 6}")
    removed = []
    users = [Subject.named("user", f"u{number}") for number in range(4)]
    threads = [threading.Thread(target=lambda u=u: removed.extend(engine.forget([u]))) for u in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted({text[0] for text in removed}) == [n for n in range(60) if n % 6 < 4]
    assert sorted(documents_of(engine)) == [[n] * 9 for n in range(60) if n % 6 >= 4]
    assert engine._live.view.forgetting == frozenset()


def test_a_flush_forgets_no_subject_that_is_to_be_forgotten():
    """Its text may still be in a snapshot."""
    engine = Engine(100)
    tier = engine._live
    tier._view.change(lambda view: replace(view, forgetting=frozenset([ADA])))
    engine.flush(Tier.LIVE)
    assert tier.view.forgetting == {ADA}


class TestAge:
    def tier(self, **options):
        self.now = 1000.0
        return LiveTier(1000, 1 << 20, lambda view: None, clock=lambda: self.now, **options)

    def publish(self, tier, *numbers):
        for number in numbers:
            self.now = number
            assert tier.publish(np.full(9, number % 1000, np.int32))

    def expired(self, tier, now):
        self.now = now
        tier.expire()
        tier.settle()
        return [document[0] for document in documents_in(tier.view)]

    def test_no_text_stays_longer_than_its_greatest_age(self, small_fresh_text):
        tier = self.tier(max_age=100)
        self.publish(tier, *range(60))
        tier.settle()
        for now in range(60, 170):
            assert min(self.expired(tier, now), default=now) >= now - 100
        assert (tier.view.segments, tier.view.fresh_tokens) == ((), 0)

    def test_what_is_nearly_as_old_leaves_with_it_and_else_nothing(self, small_fresh_text):
        tier = self.tier(max_age=80)
        self.publish(tier, *range(60))
        tier.settle()
        assert self.expired(tier, 80) == list(range(60))
        assert self.expired(tier, 81) == list(range(11, 60)), "an eighth of the age at a time"
        before = tier.view.segments
        assert self.expired(tier, 90) == list(range(11, 60))
        assert tier.view.segments == before, "no segment is sorted again for each document"

    def test_without_one_nothing_leaves(self, small_fresh_text):
        tier = self.tier()
        self.publish(tier, *range(60))
        assert self.expired(tier, 10**9) == list(range(60))
