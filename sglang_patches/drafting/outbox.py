"""Sends frames to the draft process, so that nobody else waits for it."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import NamedTuple

from prometheus_client import Counter

MESSAGES = Counter("specstore_draft_messages", "Messages from and to the draft process", ["direction"])
BYTES = Counter("specstore_draft_bytes", "Bytes from and to the draft process", ["direction"])


class _Queued(NamedTuple):
    since: float  # by monotonic
    frame: bytes
    messages: int


class Outbox:
    """A thread sends what is put in, in order, as much at once as has come meanwhile."""

    _bytes, _messages = BYTES.labels("sent"), MESSAGES.labels("sent")

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._queue: deque[_Queued] = deque()
        self._sending: float | None = None  # when the oldest frame of what is being sent came
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send, name="specstore-draft-outbox", daemon=True)
        self._thread.start()

    def put(self, frame: bytes, messages: int) -> None:
        """messages: the number of them in the frame. Never blocks."""
        with self._changed:
            self._queue.append(_Queued(time.monotonic(), frame, messages))
            self._changed.notify()

    def waited(self) -> float:
        """Seconds that the oldest frame has waited which is not sent whole; 0.0 if all are."""
        with self._changed:
            oldest = self._queue[0].since if self._queue else None
            since = oldest if self._sending is None else self._sending
        return 0.0 if since is None else time.monotonic() - since

    def clear(self) -> int:
        """Drops what waits to be sent; returns the number of messages."""
        with self._changed:
            dropped = sum(queued.messages for queued in self._queue)
            self._queue.clear()
        return dropped

    def close(self) -> None:
        """To be called once the socket is shut down."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _send(self) -> None:
        while batch := self._next():
            data = b"".join(queued.frame for queued in batch)
            try:
                self._to.sendall(data)
            except OSError:  # the draft process has ended, which its channel learns by reading
                with self._changed:
                    self._queue.extendleft(reversed(batch))
                return
            self._bytes.inc(len(data))
            self._messages.inc(sum(queued.messages for queued in batch))

    def _next(self) -> list[_Queued]:
        """Waits for frames. Empty when the box is closed."""
        with self._changed:
            self._sending = None
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return []
            batch = list(self._queue)
            self._queue.clear()
            self._sending = batch[0].since
            return batch
