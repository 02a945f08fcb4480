"""The channel to a draft process, which it starts, watches and starts again."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Counter, Gauge

from sglang_patches.drafting.peer import BYTES, MESSAGES, Outbox, Peer
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.exchange.messages import Answer, Growth, Message, Ready
from sglang_patches.exchange.wire import DamagedFrameError, answers_from_draft, frame_of

logger = logging.getLogger(__name__)

# A tensor-parallel rank without a draft process reports 0.
UP = Gauge(
    "specstore_draft_up",
    "Draft processes that are ready: one of each scheduler with drafts. While one is down its requests get the fallback's drafts",
    multiprocess_mode="livesum",
)
RESTARTS = Counter(
    "specstore_draft_restarts", "Draft processes started again after one had ended, or hung and been killed"
)
DROPPED = Counter(
    "specstore_draft_dropped",
    "Messages not sent because the draft process was down, and answers that came faster than the worker collects them (uncollected)",
    ["reason"],
)
_DOWN, _UNCOLLECTED = map(DROPPED.labels, ("down", "uncollected"))

READY_SECONDS = 600.0  # a large model is loaded from a slow disk
STALL_SECONDS = 30.0  # far longer than a draft forward
LATE_SECONDS = 3.0  # silence after which no step waits; a live process says something every second, unless a forward takes longer
STOP_SECONDS = 5.0
PAUSE_SECONDS = 0.02  # between two readings of a draft process that says more than is collected


# Answers and their nodes. The worker takes all in at once, in up to 80 ms on a slow core. A sound draft side says some hundred in a
# step.
MOST = 1 << 15


class Backoff(NamedTuple):
    """Seconds between the end of a draft process and the next start: `first`, doubled each time up to `most`, and `first` again
    after a process that was ready for `healthy` seconds."""

    first: float
    most: float
    healthy: float


class ProcessChannel(DraftChannel):
    """The draft process ends with this one, however this one ends.

    - `close` hangs up, and is called at the interpreter's exit. A draft process that does not end within `STOP_SECONDS` is killed.
    - The kernel kills it when this process is gone (`ParentConnection` asks for that).

    A draft process that hangs is killed and started again: one that has said nothing for `STALL_SECONDS` after a message. A live one
    reads and works in turn, and says something every second meanwhile (`ParentConnection`). So this finds a process that does not
    read, and one whose device does not return.

    What is posted while none is ready is dropped. The next one says which sessions it has not.
    """

    _bytes, _messages = BYTES.labels("received"), MESSAGES.labels("received")

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        backoff: Backoff = Backoff(1.0, 60.0, 10.0),  # noqa: B008 - a constant
    ) -> None:
        """Waits until the draft process is ready.

        command: the program and its arguments; it uses `ParentConnection`. environment: what differs from this process's.
        log: file that gets its output. Raises RuntimeError with the end of its log if it does not become ready within
        `READY_SECONDS`."""
        self._command, self._environment, self._log, self._backoff = command, environment, log, backoff
        self._changed = threading.Condition()
        self._answers = Inbox()
        self._outbox: Outbox | None = None  # while the draft process is ready
        self._owing: float | None = None  # since when it owes a sign of life, by monotonic
        self._peer: Peer | None = None
        self._closing = threading.Event()
        self._first_ready: Future[Ready] = Future()
        self._supervisor = threading.Thread(target=self._supervise, name="specstore-draft", daemon=True)
        self._supervisor.start()
        atexit.register(self.close)
        try:
            self.ready = self._first_ready.result()
        except BaseException:
            self.close()
            raise

    def post(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        with self._changed:
            if self._outbox is None:
                _DOWN.inc(len(messages))
                return
            self._outbox.put(frame_of(messages), len(messages))
            self._owing = self._owing or time.monotonic()

    def collect(self, seconds: float) -> list[Answer]:
        if not self._answers and (seconds <= 0.0 or self._silent):
            return []
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._silent, max(0.0, seconds))
            return self._answers.take()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing.set()
        with self._changed:
            peer = self._peer
        if peer is not None:
            peer.hang_up()
        self._supervisor.join()

    @property
    def _silent(self) -> bool:
        """Whether no answer is to be expected."""
        return self._outbox is None or self._overdue() > LATE_SECONDS

    def _overdue(self) -> float:
        """Seconds for which it has owed a sign of life."""
        owing = self._owing
        return 0.0 if owing is None else time.monotonic() - owing

    # The supervisor's thread

    def _supervise(self) -> None:
        delay = self._backoff.first
        while True:
            healthy, end = self._run()
            if self._closing.is_set() or not self._first_ready.done():
                break
            if healthy >= self._backoff.healthy:
                delay = self._backoff.first
            logger.error("specstore: starting the draft process again in %g s: %s", delay, end)
            if self._closing.wait(delay):
                break
            delay = min(2 * delay, self._backoff.most)
            RESTARTS.inc()
        if not self._first_ready.done():
            self._first_ready.set_exception(RuntimeError(f"the draft process is not ready: {end}"))

    def _run(self) -> tuple[float, str]:
        """One draft process, from its start to its end. Returns the seconds for which it was ready, and how it ended."""
        try:
            peer = Peer(self._command, self._environment, self._log)
        except OSError as error:
            return 0.0, f"it could not be started: {error}"
        logger.info("specstore: draft process %d is starting; its log: %s", peer.pid, self._log)
        with self._changed:
            self._peer = peer
        if self._closing.is_set():
            peer.hang_up()
        fault = self._listen(peer)
        killed = fault or (self._closing.is_set() and self._outbox is None)
        healthy = self._went_down(peer)
        status = peer.end(0.0 if killed else STOP_SECONDS)
        how = f"was killed because it {fault}" if fault else f"ended with status {status}"
        return healthy, f"it {how} and was ready for {healthy:.0f} s; {self._log} ends:\n{peer.tail()}"

    def _listen(self, peer: Peer) -> str:
        """Takes in what it says until it ends. Returns what it did wrong, if anything."""
        incoming = answers_from_draft()
        self._owing = time.monotonic()
        try:
            while data := self._receive(peer):
                self._owing = None
                self._bytes.inc(len(data))
                if self._hear(peer, incoming.feed(data)):
                    # Its socket fills up, and the worker has the interpreter.
                    self._closing.wait(PAUSE_SECONDS)
        except TimeoutError:
            if self._outbox is None:
                return f"was not ready after {READY_SECONDS:g} s"
            return f"had not answered for {STALL_SECONDS:g} s"
        except DamagedFrameError as error:
            return f"sent what it should not ({error})"
        return ""

    def _receive(self, peer: Peer) -> bytes:
        """Raises TimeoutError when it has been silent for too long."""
        limit = READY_SECONDS if self._outbox is None else STALL_SECONDS
        while True:
            owing, overdue = self._owing, self._overdue()
            try:
                return peer.receive(limit - overdue)
            except TimeoutError:
                if owing is not None and owing == self._owing:
                    raise

    def _hear(self, peer: Peer, answers: Sequence[Answer | Ready]) -> int:
        """Returns how many answers there is no room for."""
        self._messages.inc(len(answers))
        surplus = 0
        with self._changed:
            for answer in answers:
                if (self._outbox is None) != isinstance(answer, Ready):
                    raise DamagedFrameError(f"{type(answer).__name__} out of turn")
                if isinstance(answer, Ready):
                    self._came_up(peer, answer)
                else:
                    surplus += self._answers.put(answer)
            _UNCOLLECTED.inc(surplus)
            self._changed.notify()
        return surplus

    def _came_up(self, peer: Peer, ready: Ready) -> None:
        logger.info(
            "specstore: the draft process is ready after %.1f s, %d KV slots", ready.seconds, ready.tokens
        )
        self._up_since = time.monotonic()
        self._outbox = Outbox(peer.socket)
        UP.set(1)
        if not self._first_ready.done():
            self._first_ready.set_result(ready)

    def _went_down(self, peer: Peer) -> float:
        """Returns the seconds for which it was ready."""
        with self._changed:
            outbox, self._outbox = self._outbox, None
            self._peer = None
            self._changed.notify()
        if outbox is None:
            return 0.0
        UP.set(0)
        peer.hang_up()
        _DOWN.inc(outbox.close())
        return time.monotonic() - self._up_since


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
