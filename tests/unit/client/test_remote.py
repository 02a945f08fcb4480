"""GrpcDatastore against a service in this process."""

import logging
import threading
import time

import numpy as np
import pytest

from datastore_service.client import remote
from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import MAX_UNANSWERED, DeadlineMissedError, GrpcDatastore, StepState
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from tests.unit.server.service import running
from tests.waiting import eventually

NAMESPACE = Namespace("m", "t")
TEXT = np.array([1, 2, 3, 4] * 10, np.int32)
SECONDS = 60.0


@pytest.fixture
def service():
    with running() as service:
        yield service


@pytest.fixture
def datastore(service):
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(SECONDS)
    yield datastore
    datastore.close()


@pytest.fixture
def go_on(service, datastore, monkeypatch):
    """The service answers no step until this is set."""
    (hosted,) = service.namespaces
    step, go_on = hosted.engine.step, threading.Event()

    def held_step(entries):
        assert go_on.wait(120)
        return step(entries)

    monkeypatch.setattr(hosted.engine, "step", held_step)
    yield go_on
    go_on.set()


def opened(name: str) -> Entry:
    return Entry(name, tokens=TEXT, opening=Opening(prompt_length=len(TEXT)))


def test_post_comes_before_a_later_step(datastore):
    datastore.post([opened("a")])
    (reply,) = datastore.step([Entry("a", start=40, budget=Budget(8))], SECONDS)
    assert (reply.status, reply.known) == (Status.OK, 40)
    assert reply.tree.tokens.tolist() == [1, 2, 3, 4] * 2
    reply.tree.check_integrity(nodes=8, depth=16, children=8)


@pytest.mark.parametrize("there", [False, True])
def test_a_late_reply_is_not_taken_for_the_next(datastore, go_on, there):
    """there: before the next step is sent."""
    datastore.post([opened("a"), opened("b")])
    entries = [Entry("a", start=40, tokens=np.array([7], np.int32))]
    late = datastore.submit(entries)
    with pytest.raises(DeadlineMissedError):
        datastore.collect(late, entries, time.monotonic() + 0.02)
    if there:
        go_on.set()
        eventually(lambda: datastore.state_of(late) is StepState.ANSWERED)
    entries = [Entry("b", start=40)]
    step = datastore.submit(entries)
    go_on.set()
    (reply,) = datastore.collect(step, entries, time.monotonic() + SECONDS)
    assert reply.known == 40
    (reply,) = datastore.step([Entry("a", start=41)], SECONDS)
    assert reply.known == 41


def test_deadline_is_kept(datastore, go_on, monkeypatch):
    """A reply is waited for until then, however long the machine takes to say so."""
    collect, waits = datastore.collect, []

    def noted(step, entries, until):
        waits.append((until, time.monotonic()))
        return collect(step, entries, until)

    monkeypatch.setattr(datastore, "collect", noted)
    begun = time.monotonic()
    with pytest.raises(DeadlineMissedError):
        datastore.step([opened("a")], 0.05)
    ((until, now),) = waits
    assert begun + 0.05 <= until <= now + 0.05


def test_post_neither_waits_nor_raises(datastore, go_on, caplog):
    """A service that lags behind by more than the bound is dropped, and connected to again."""
    caplog.set_level(logging.WARNING, remote.__name__)
    started = time.monotonic()
    for _ in range(MAX_UNANSWERED + 10):
        datastore.post([opened("a")])
    assert time.monotonic() - started < 30
    eventually(lambda: f"{MAX_UNANSWERED} messages unanswered; connecting again" in caplog.text)
    go_on.set()
    assert datastore.wait_connected(SECONDS)


def test_gone_service_fails_at_once(service, datastore):
    service.stop()
    started = time.monotonic()
    with pytest.raises(DatastoreError):
        datastore.step([opened("a")], 2 * SECONDS)
    assert time.monotonic() - started < SECONDS
    datastore.post([opened("a")])


def test_an_idle_stream_is_pinged_and_stays_open(service, monkeypatch):
    """gRPC's service ends connections for more than two pings that come sooner than it permits."""
    hurried = dict(remote._CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1_200}
    monkeypatch.setattr(remote, "_CHANNEL_OPTIONS", tuple(hurried.items()))
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    try:
        assert datastore.wait_connected(SECONDS)
        stream = datastore._call
        time.sleep(7.0)
        assert datastore._call is stream and stream.is_active()
    finally:
        datastore.close()


def test_a_refused_entry_says_why_and_the_stream_lives_on(service, datastore):
    entries = [Entry("a", opening=Opening()), Entry("b", tokens=np.array([5000], np.int32))]
    served, refused = datastore.step(entries, SECONDS)
    assert (served.status, served.refusal) == (Status.OK, "")
    assert refused.status is Status.OVER_BUDGET and refused.refusal.startswith("tokens[0]: 5000 is not below")
    assert not datastore.disconnect_reason


def test_never_there():
    datastore = GrpcDatastore("127.0.0.1:1", NAMESPACE)
    assert not datastore.wait_connected(0.3)
    with pytest.raises(DatastoreError):
        datastore.step([], SECONDS)
    datastore.close()
    datastore.close()


def test_close_ends_the_thread_and_later_calls_fail(datastore):
    datastore.close()
    datastore._thread.join(SECONDS)
    assert not datastore._thread.is_alive()
    with pytest.raises(DatastoreError, match="closed"):
        datastore.step([], SECONDS)
