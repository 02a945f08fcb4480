"""The draft process's end of its channel says something from time to time, also where there is nothing to answer."""

import contextlib
import socket
from types import SimpleNamespace

import pytest

from sglang_patches.drafting.channel import LATE_SECONDS, STALL_SECONDS
from sglang_patches.exchange import connection as connection_module
from sglang_patches.exchange.connection import (
    BEAT_SECONDS,
    READ_BYTES,
    SOCKET_VARIABLE,
    ParentConnection,
)
from sglang_patches.exchange.messages import Closed
from sglang_patches.exchange.wire import frame_of


class EndedError(Exception):
    """Ends the test's wait."""


@pytest.fixture
def ends(monkeypatch):
    """The connection, and the worker's socket."""
    worker, draft = socket.socketpair()
    monkeypatch.setenv(SOCKET_VARIABLE, str(draft.detach()))
    monkeypatch.setattr(ParentConnection, "_end_with_parent", lambda self: None)  # the test goes on
    with worker:
        yield ParentConnection(), worker


def test_a_live_process_has_spoken_before_it_counts_as_silent():
    assert 2 * BEAT_SECONDS <= LATE_SECONDS <= STALL_SECONDS / 2


def test_a_message_without_an_answer_is_answered_after_a_beat(ends, monkeypatch):
    connection, worker = ends
    worker.sendall(frame_of([Closed("nobody's")]))
    assert [message.session for message in connection.receive(None)] == ["nobody's"]
    waits = []

    def poll(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            raise EndedError
        return False

    monkeypatch.setattr(connection, "_poll", poll)
    with pytest.raises(EndedError):
        connection.receive(None)
    assert waits[0] <= BEAT_SECONDS < waits[1]
    worker.setblocking(False)
    assert worker.recv(READ_BYTES) == frame_of([])


def test_messages_that_follow_do_not_put_the_beat_off(ends, monkeypatch):
    connection, worker = ends
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(connection_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    worker.setblocking(False)
    said = []
    for _ in range(25):
        worker.sendall(frame_of([Closed("nobody's")]))
        assert connection.receive(0.0)
        with contextlib.suppress(BlockingIOError):
            said += [clock.now] * (worker.recv(READ_BYTES) == frame_of([]))
        clock.now += BEAT_SECONDS / 8
    assert said == [100 + beats * BEAT_SECONDS for beats in (1, 2, 3)]


def test_before_a_message_there_is_nothing_to_say(ends, monkeypatch):
    connection, _ = ends
    monkeypatch.setattr(connection, "_poll", lambda seconds: False)
    assert connection.receive(0.0) == []
