"""Forgets of services that share: told in parts, again and after losses; what is published after the answer stays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from datastore_service.engine.provenance import Subject
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.forgetting import forget
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.namespaces import Namespaces
from datastore_service.server.sharing import forgetting, messages, places, stream, thread
from datastore_service.server.sharing.address import ShareFiles, parse_share
from datastore_service.server.sharing.keys import keys_of
from datastore_service.server.sharing.metrics import ShareMetrics
from datastore_service.server.sharing.thread import Sharing
from proto_gen.specstore.v1 import admin_pb2 as pb
from proto_gen.specstore.v1.drafting_pb2 import Namespace as NamespaceMessage
from tests.live_text import documents_in
from tests.support.servers.share import ShareServer

NAMESPACE = Namespace("m", "ab" * 32, "acme")
LIMITS = ServiceLimits()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ShareServer(tmp_path_factory.mktemp("share")) as started:
        yield started


class Service:
    """A service with one namespace, whose rounds the test makes."""

    def __init__(self, server: ShareServer) -> None:
        self.namespaces = Namespaces(engine_factory(None, 1000), LIMITS)
        self.engine = self.namespaces.open(NAMESPACE).engine
        self.sharing = Sharing(
            parse_share(server.url, "", ShareFiles()), self.namespaces, ShareMetrics(CollectorRegistry())
        )
        self.round()

    def publish(self, token: int, user: str = "alice") -> None:
        text = np.full(5, token, np.int32)
        self.engine.step([Entry("s", tokens=text, opening=Opening(user=user), closing=True)])

    def forget(self, *users: str) -> None:
        asked = pb.ForgetRequest(namespace=NamespaceMessage(tenant="acme"), users=users)
        forget(asked, self.namespaces, LIMITS, self.sharing)

    def round(self) -> None:
        assert self.sharing._round()

    @property
    def texts(self) -> list[int]:
        """The tokens that were published, one for each text."""
        return sorted(document[0] for document in documents_in(self.engine._live.view))


@pytest.fixture
def pair(server):
    server.client.flushall()
    return Service(server), Service(server)


def test_more_subjects_than_a_message_has_are_told_in_several(pair, monkeypatch):
    for module in (messages, forgetting):
        monkeypatch.setattr(module, "MOST_SUBJECTS", 2)
    one, other = pair
    for token in range(5):
        other.publish(token, f"user {token}")
    one.forget("user 0", "user 1")
    one.forget("user 2", "user 3")
    one.round()
    other.round()
    assert other.texts == [4] and one.sharing._state.forgetting == set()


def test_a_call_that_comes_while_another_is_told_is_told_too(pair, monkeypatch):
    one, other = pair

    def have_forgotten(*words):
        monkeypatch.undo()
        forgetting.have_forgotten(*words)
        other.round()
        other.publish(1)
        one.forget("alice")

    monkeypatch.setattr(forgetting, "have_forgotten", have_forgotten)
    one.forget("alice")
    for _ in range(2):
        one.round()
        other.round()
    assert other.texts == one.texts == []


def test_a_server_that_has_lost_all_is_told_what_was_called_for_meanwhile(server, pair):
    one, other = pair
    other.publish(1)
    other.round()
    one.round()
    assert one.texts == [1]
    one.forget("alice")
    server.client.flushall()
    one.round()
    other.round()
    one.round()
    assert one.texts == other.texts == []


def test_what_is_published_after_the_answer_stays(pair):
    one, other = pair
    other.publish(1)
    other.round()  # one has not read it
    one.publish(2)
    one.forget("alice")
    one.publish(3)
    for _ in range(2):
        one.round()
        other.round()
    assert one.texts == other.texts == [3]
    other.publish(4)
    other.round()
    one.round()
    assert one.texts == [3, 4]


def test_a_text_that_was_read_and_not_taken_is_forgotten(pair, monkeypatch):
    """The call comes between the two."""
    one, other = pair
    other.publish(1)
    other.round()

    def messages_after(*words):
        monkeypatch.undo()
        messages = places.messages_after(*words)
        assert len(messages) == 1
        one.forget("alice")
        return messages

    monkeypatch.setattr(stream, "messages_after", messages_after)
    one.round()
    assert one.texts == []


def test_a_text_on_its_way_into_the_live_tier_is_forgotten(pair, monkeypatch):
    """The call waits for it, or it is not taken."""
    one, other = pair
    other.publish(1)
    other.round()
    take = one.engine.take
    monkeypatch.setattr(one.engine, "take", lambda *text: one.sharing._lock.locked() and take(*text))
    one.round()
    assert one.texts == [1], "the lock that notes a call is held meanwhile"


def test_a_forget_that_was_read_is_not_read_again(pair, monkeypatch):
    monkeypatch.setattr(thread, "SAVE_SECONDS", math.inf)
    one, other = pair
    one.forget("alice")
    one.round()
    other.round()
    texts = keys_of(NAMESPACE).texts
    assert other.sharing._state.positions[texts] == other.sharing._positions[texts]


def test_a_loss_is_told_of(server, pair, caplog):
    one, _ = pair
    one.publish(1)
    one.round()
    server.client.flushall()
    one.publish(2)
    one.round()
    assert "the server has lost messages; repeat here each forget since then" in caplog.text
    assert one.sharing._metrics.missed.labels("m", "acme")._value.get() == 1
    assert server.client.xlen(keys_of(NAMESPACE).texts) == 2


def test_a_round_ends_while_the_live_tier_takes_nothing(pair, monkeypatch):
    one, other = pair
    other.publish(1)
    other.round()
    one.publish(2)
    answers = iter([False])
    monkeypatch.setattr(one.engine, "take", lambda *text: next(answers))
    one.round()
    assert next(answers, None) is None and one.texts == [2]
    monkeypatch.undo()
    one.round()
    assert one.texts == [1, 2]


def test_subjects_are_names_of_the_message():
    """Their order is the same in every run."""
    parts = list(forgetting._parts({Subject.named("user", str(number)) for number in range(1025)}))
    assert [len(part) for part in parts] == [1024, 1]
