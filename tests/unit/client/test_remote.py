"""GrpcDatastore against a service in this process."""

import contextlib
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

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
    with no_wait(datastore):
        for sent in range(MAX_UNANSWERED):
            datastore.post([opened("a")])
            assert (datastore._sent, datastore._answered) == (sent + 1, 0) and not datastore.disconnect_reason
        datastore.post([opened("a")])
    eventually(lambda: f"{MAX_UNANSWERED} messages unanswered; connecting again" in caplog.text)
    go_on.set()
    assert datastore.wait_connected(SECONDS)


@pytest.mark.clock
def test_the_seconds_of_posts_to_a_service_that_does_not_answer(datastore, go_on):
    begun = time.monotonic()
    for _ in range(2 * MAX_UNANSWERED):
        datastore.post([opened("a")])
    assert time.monotonic() - begun < 2 * MAX_UNANSWERED * 0.001


@contextlib.contextmanager
def no_wait(datastore):
    """This thread fails if it waits for another one or for a reply."""
    here, wait = threading.current_thread(), threading.Condition.wait

    def wait_of_others(condition, timeout=None):
        assert threading.current_thread() is not here, "it waits"
        return wait(condition, timeout)

    with (
        mock.patch.object(threading.Condition, "wait", wait_of_others),
        mock.patch.object(datastore, "collect") as collect,
    ):
        yield
    collect.assert_not_called()


def test_a_step_for_a_service_that_is_gone_fails_without_a_wait(service, datastore):
    service.stop()
    eventually(lambda: datastore.disconnect_reason)
    with no_wait(datastore):
        with pytest.raises(DatastoreError):
            datastore.step([opened("a")], SECONDS)
        datastore.post([opened("a")])


@pytest.mark.parametrize("again", [False, True])
def test_a_step_whose_stream_breaks_fails_at_once(datastore, go_on, again):
    """again: whether another stream is open by then. A reply that was there would be found without a wait, so the step gets none."""
    entries = [opened("a")]
    step = datastore.submit(entries)
    datastore._call.cancel()
    eventually(lambda: datastore.state_of(step) is StepState.LOST)
    go_on.set()
    if again:
        assert datastore.wait_connected(SECONDS)
    with pytest.raises(DatastoreError) as raised:
        datastore.collect(step, entries, time.monotonic())
    assert not isinstance(raised.value, DeadlineMissedError)


def test_a_step_that_waits_learns_that_its_stream_breaks(datastore, go_on):
    """Before its deadline."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(datastore.step, [opened("a")], SECONDS)
        eventually(lambda: datastore._awaited)
        datastore._call.cancel()
        assert not isinstance(waiting.exception(), DeadlineMissedError | None)


PINGS = 4  # the service ends a connection at the third that comes too soon


class Pings:
    """A proxy to a service that counts the pings of its client. HTTP/2: RFC 9113."""

    def __init__(self, endpoint: str) -> None:
        self.count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "{}:{}".format(*self._listener.getsockname())
        host, _, port = endpoint.rpartition(":")
        self._target = host, int(port)
        threading.Thread(target=self._forward, daemon=True).start()

    def _forward(self) -> None:
        near, _ = self._listener.accept()
        with self._listener, near, socket.create_connection(self._target) as far:
            threading.Thread(target=self._pump, args=(far, near), daemon=True).start()
            reading = near.makefile("rb")
            far.sendall(reading.read(24))  # the connection's preface
            while head := reading.read(9):
                far.sendall(head + reading.read(int.from_bytes(head[:3])))
                self.count += (head[3], head[4]) == (6, 0)  # PING, and not the answer to one

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test is over
            while data := source.recv(65536):
                sink.sendall(data)


def test_an_idle_stream_is_pinged_and_stays_open(service, monkeypatch):
    """gRPC's service ends connections for more than two pings that come sooner than it permits."""
    hurried = dict(remote._CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1_100}
    monkeypatch.setattr(remote, "_CHANNEL_OPTIONS", tuple(hurried.items()))
    pings = Pings(service.endpoint)
    datastore = GrpcDatastore(pings.endpoint, NAMESPACE)
    try:
        assert datastore.wait_connected(SECONDS)
        stream, before = datastore._call, pings.count
        eventually(lambda: pings.count >= before + PINGS)
        datastore.step([opened("a")], SECONDS)
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
