"""One run of the draft process, as its parent sees it, and what goes there so that nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Counter

from sglang_patches.exchange.connection import READ_BYTES, SOCKET_VARIABLE

MESSAGES = Counter(
    "specstore_draft_messages", "Messages to the draft process (sent) and from it (received)", ["direction"]
)
BYTES = Counter(
    "specstore_draft_bytes", "Bytes to the draft process (sent) and from it (received)", ["direction"]
)
TAIL_LINES = 25
_TAIL_BYTES = 1 << 14


class Peer:
    """A program in a session of its own, with a socket to it. Its output is appended to `log`.

    To be made in a thread that lives longer than the program: Linux takes the end of that thread for the end of the parent
    (PR_SET_PDEATHSIG).
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts the program. Raises OSError.

        environment: what differs from this process's.
        """
        self._log = log
        self.socket, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._log_start = output.tell()
            environment = os.environ | environment | {SOCKET_VARIABLE: str(theirs.fileno())}
            self._process = self._start(command, environment, theirs.fileno(), output.fileno())
        self._exit = os.pidfd_open(self._process.pid)
        self._events = select.poll()
        self._events.register(self.socket, select.POLLIN)
        self._events.register(self._exit, select.POLLIN)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptor: int, output: int
    ) -> subprocess.Popen:
        """Runs the program in a session of its own.

        descriptor: of the program's end of the socket.
        output: descriptor of what it prints to.
        """
        return subprocess.Popen(
            command,
            env=environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self, seconds: float | None) -> bytes:
        """What has come over the socket, waited for; nothing when there is no more to come. Raises TimeoutError."""
        events = dict(self._events.poll(None if seconds is None else max(0.0, seconds) * 1e3))
        if not events:
            raise TimeoutError
        if self.socket.fileno() not in events:
            return b""  # it has ended, although a child of its own holds the socket
        try:
            return self.socket.recv(READ_BYTES)
        except ConnectionResetError:  # it has ended with messages unread
            return b""

    def hang_up(self) -> None:
        """The program sees the end of the socket, and so do all who use the socket here."""
        with contextlib.suppress(OSError):  # done before
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace: float) -> int:
        """Hangs up, waits `grace` seconds for the program to end, then kills its process group. Returns its exit status, negative:
        the signal that ended it. Nobody may use the socket any more."""
        self.hang_up()
        exited = select.poll()
        exited.register(self._exit, select.POLLIN)
        exited.poll(grace * 1e3)
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        os.close(self._exit)
        self.socket.close()
        return status

    def tail(self) -> str:
        """The last lines that this run has logged, or why they cannot be read."""
        try:
            with self._log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return str(error)
        return "\n".join(lines[-TAIL_LINES:])


class _Queued(NamedTuple):
    frame: bytes
    messages: int


class Outbox:
    """Sends in order. What the socket has no room for waits for a thread, which sends all that has come meanwhile at once.

    If the thread sent every frame, each would wait for the interpreter's lock: milliseconds beside a busy worker.
    """

    _bytes, _messages = BYTES.labels("sent"), MESSAGES.labels("sent")

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._sending: list[_Queued] = []  # by the thread; of the first a part may be sent already
        self._queue: list[_Queued] = []  # behind them
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send, name="specstore-draft-outbox", daemon=True)
        self._thread.start()

    def put(self, frame: bytes, messages: int) -> None:
        """Sends a frame, or queues what there is no room for. Never blocks.

        messages: number of messages in the frame.
        """
        with self._changed:
            if self._sending:
                self._queue.append(_Queued(frame, messages))
            elif rest := self._send_now(frame):
                self._sending.append(_Queued(rest, messages))
                self._changed.notify()
            else:
                self._messages.inc(messages)

    def close(self) -> int:
        """To be called once the socket is shut down. Returns the number of messages that were not sent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        return _count(self._sending + self._queue)

    def _send_now(self, frame: bytes) -> bytes:
        """The rest that there was no room for."""
        try:
            sent = self._to.send(frame, socket.MSG_DONTWAIT)
        except OSError:  # no room, or the draft process has ended
            return frame
        self._bytes.inc(sent)
        return frame[sent:]

    def _send(self) -> None:
        while batch := self._next():
            data = b"".join(queued.frame for queued in batch)
            try:
                self._to.sendall(data)
            except OSError:
                return  # the draft process has ended, which its channel learns by reading
            self._bytes.inc(len(data))
            self._messages.inc(_count(batch))
            with self._changed:
                self._sending, self._queue = self._queue, []

    def _next(self) -> list[_Queued]:
        """Waits for frames. Empty when the box is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._sending or self._closed)
            return [] if self._closed else self._sending


def _count(frames: list[_Queued]) -> int:
    return sum(queued.messages for queued in frames)
