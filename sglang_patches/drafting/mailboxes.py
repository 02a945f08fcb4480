"""What goes to the draft process, so that nobody waits for it, and what it has said and nobody has collected, which is bounded."""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import NamedTuple

from prometheus_client import Counter

from sglang_patches.exchange.messages import Answer, Growth

MESSAGES = Counter("specstore_draft_messages", "Messages from and to the draft process", ["direction"])
BYTES = Counter("specstore_draft_bytes", "Bytes from and to the draft process", ["direction"])


# Answers and their nodes. The worker takes all in at once, in up to 80 ms on a slow core. A sound draft side says some hundred in a
# step.
MOST = 1 << 15


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


class Inbox:
    """Drops the oldest answers: they are the likeliest to be of epochs that are over."""

    def __init__(self) -> None:
        self._answers: deque[Answer] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._answers)

    def put(self, answer: Answer) -> int:
        """Returns how many answers were dropped for it."""
        self._answers.append(answer)
        self._size += _size(answer)
        dropped = 0
        while self._size > MOST:
            self._size -= _size(self._answers.popleft())
            dropped += 1
        return dropped

    def take(self) -> list[Answer]:
        """All of them, in order."""
        answers = list(self._answers)
        self._answers.clear()
        self._size = 0
        return answers


def _size(answer: Answer) -> int:
    return 1 + (max(len(answer.nodes), len(answer.tokens)) if isinstance(answer, Growth) else 0)
