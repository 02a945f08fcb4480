"""The draft process's end of the channel to its worker."""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import time
from collections.abc import Sequence

from sglang_patches.exchange.messages import Answer, Message, Ready
from sglang_patches.exchange.wire import frame_of, messages_from_worker

SOCKET_VARIABLE = "SPECSTORE_DRAFT_SOCKET"  # names the file descriptor
READ_BYTES = 1 << 20
BEAT_SECONDS = 1.0  # after which messages that have no answer are answered with an empty frame

_PR_SET_PDEATHSIG = 1


class ParentConnection:
    """To be made before anything slow: from then on this process ends with its parent.

    The parent kills this process when it says nothing to a message for long. So `receive` says something from time to time.

    What a damaged frame raises is `wire.DamagedFrameError`; the process should end then."""

    def __init__(self) -> None:
        """Raises RuntimeError where no worker has started this process, EOFError if it is gone already."""
        descriptor = os.environ.pop(SOCKET_VARIABLE, None)
        if descriptor is None:
            raise RuntimeError(f"{SOCKET_VARIABLE} is not set: a draft process is started by its worker")
        self._socket = socket.socket(fileno=int(descriptor))
        self._socket.set_inheritable(False)  # as all other files of Python's
        self._incoming = messages_from_worker()
        self._beat = math.inf  # when something has to be said, by monotonic
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._end_with_parent()

    def receive(self, timeout: float | None) -> list[Message]:
        """All messages that have come; if none has, waits for some: `timeout` seconds, or as long as it takes. [] after that time.
        A frame that has begun is waited for. Raises EOFError when the parent is gone."""
        messages: list[Message] = []
        wait = math.inf if timeout is None else timeout
        while self._wait(wait):
            messages += self._incoming.feed(self._read())
            wait = math.inf if self._incoming.partial else 0.0
        return messages

    def send(self, answers: Sequence[Answer | Ready]) -> None:
        """One frame. Waits for room in the socket, which the parent makes at any time. Raises EOFError when the parent is gone."""
        try:
            self._socket.sendall(frame_of(answers))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise EOFError("the parent is gone") from error
        self._beat = math.inf

    def _wait(self, seconds: float) -> bool:
        """Whether something comes within so many seconds. Says something when it is time."""
        until_beat = max(0.0, self._beat - time.monotonic())
        if until_beat and self._poll(min(seconds, until_beat)):
            return True
        if until_beat > seconds:
            return False
        self.send([])
        return self._poll(seconds - until_beat)

    def _poll(self, seconds: float) -> bool:
        return bool(self._readable.poll(None if seconds == math.inf else seconds * 1e3))

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(READ_BYTES)
        except ConnectionResetError:  # it left answers unread
            data = b""
        if not data:
            raise EOFError("the parent is gone")
        self._beat = min(self._beat, time.monotonic() + BEAT_SECONDS)
        return data

    def _end_with_parent(self) -> None:
        """The socket's end says the same, but nobody reads it during a long load."""
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        hung_up = select.poll()
        hung_up.register(self._socket, select.POLLHUP)
        if hung_up.poll(0):  # it ended before the call
            raise EOFError("the parent is gone")
