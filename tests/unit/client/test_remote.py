"""GrpcDatastore against a service in this process."""

import time

import numpy as np
import pytest

from datastore_service.client import remote
from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import MAX_UNANSWERED, DeadlineMissedError, GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from tests.unit.server.service import running

NAMESPACE = Namespace("m", "t")
TEXT = np.array([1, 2, 3, 4] * 10, np.int32)
SECONDS = 10.0


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
def slow_engine(service, datastore, monkeypatch):
    """Sets how long the service takes for a step."""
    (hosted,) = service.namespaces
    step, delay = hosted.engine.step, [0.0]

    def slow_step(entries):
        time.sleep(delay[0])
        return step(entries)

    monkeypatch.setattr(hosted.engine, "step", slow_step)
    return lambda seconds: delay.__setitem__(0, seconds)


def opened(name: str) -> Entry:
    return Entry(name, tokens=TEXT, opening=Opening(prompt_length=len(TEXT)))


def test_post_comes_before_a_later_step(datastore):
    datastore.post([opened("a")])
    (reply,) = datastore.step([Entry("a", start=40, budget=Budget(8))], SECONDS)
    assert (reply.status, reply.known) == (Status.OK, 40)
    assert reply.tree.tokens.tolist() == [1, 2, 3, 4] * 2
    reply.tree.check_integrity(nodes=8, depth=16, children=8)


def test_a_late_reply_is_not_taken_for_the_next(datastore, slow_engine):
    datastore.post([opened("a"), opened("b")])
    slow_engine(0.2)
    with pytest.raises(DeadlineMissedError):
        datastore.step([Entry("a", start=40, tokens=np.array([7], np.int32))], 0.02)
    (reply,) = datastore.step([Entry("b", start=40)], SECONDS)
    assert reply.known == 40
    (reply,) = datastore.step([Entry("a", start=41)], SECONDS)
    assert reply.known == 41


def test_deadline_is_kept(datastore, slow_engine):
    slow_engine(0.5)
    started = time.monotonic()
    with pytest.raises(DeadlineMissedError):
        datastore.step([opened("a")], 0.05)
    assert time.monotonic() - started < 0.2


def test_post_neither_waits_nor_raises(datastore, slow_engine):
    """A service that lags behind by more than the bound is dropped, and connected to again."""
    slow_engine(1.0)
    started = time.monotonic()
    for _ in range(MAX_UNANSWERED + 10):
        datastore.post([opened("a")])
    assert time.monotonic() - started < 0.9
    with pytest.raises(DatastoreError, match=f"{MAX_UNANSWERED} messages unanswered"):
        datastore.step([], SECONDS)
    slow_engine(0.0)
    assert datastore.wait_connected(SECONDS)


def test_gone_service_fails_at_once(service, datastore):
    service.stop()
    started = time.monotonic()
    with pytest.raises(DatastoreError):
        datastore.step([opened("a")], SECONDS)
    assert time.monotonic() - started < 5
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


def test_refusal_says_why(service, datastore):
    with pytest.raises(DatastoreError, match=r"entries\[0\].tokens\[0\]: 5000 is not below"):
        datastore.step([Entry("a", tokens=np.array([5000], np.int32))], SECONDS)
    assert datastore.wait_connected(SECONDS)


def test_never_there():
    datastore = GrpcDatastore("127.0.0.1:1", NAMESPACE)
    assert not datastore.wait_connected(0.3)
    with pytest.raises(DatastoreError):
        datastore.step([], SECONDS)
    datastore.close()
    datastore.close()


def test_close_ends_the_thread_and_later_calls_fail(datastore):
    datastore.close()
    assert not datastore._thread.is_alive()
    with pytest.raises(DatastoreError, match="closed"):
        datastore.step([], SECONDS)
