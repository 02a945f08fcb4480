"""What one tenant has been told is stored, and what has been told to go: what a query must find, and must not.

Times are of time.monotonic(). A call takes effect somewhere between its beginning and its end, so where two that matter to
each other overlap, nothing is said. Calls that wipe are made one at a time.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

UNDER_WAY = float("inf")
Interval = tuple[float, float]


@dataclass(frozen=True)
class _Published:
    """volume: tokens the tenant had sent by then. once: no message of it can still be on its way."""

    begun: float
    ended: float
    volume: int
    once: bool


@dataclass
class Wipe:
    """A call that replaces the live tier's text by what it held when a snapshot was taken, or by nothing.

    certain: the service has said that it is done."""

    begun: float
    snapshot: Interval | None
    ended: float = UNDER_WAY
    certain: bool = False

    def described(self, now: float) -> str:
        """For a report; seconds before now."""
        source = (
            "nothing"
            if self.snapshot is None
            else "a snapshot {:.2f} to {:.2f} s ago".format(*(now - moment for moment in self.snapshot))
        )
        done = "done" if self.certain else "perhaps done"
        return f"wiped to {source}, {now - self.begun:.2f} to {now - self.ended:.2f} s ago, {done}"

    def overlaps(self, begun: float, ended: float) -> bool:
        return self.begun < ended and self.ended > begun


class Ledger:
    """Thread-safe. bound: tokens sent after a document from when on the tier may have dropped it as its oldest."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._lock = threading.Lock()
        self._published: dict[int, _Published] = {}
        self._wipes: list[Wipe] = []
        self._sessions_ended = 0.0
        self._volume = 0

    def __len__(self) -> int:
        """Documents that something is known of."""
        return len(self._published)

    def sent(self, tokens: int) -> None:
        """Tokens that may enter the live tier."""
        with self._lock:
            self._volume += tokens

    def published(self, number: int, begun: float, once: bool = True) -> None:
        """Now it is acknowledged that a document is stored, the first of which was sent at `begun`. once: nothing of it
        was sent that was not answered, and may be stored later."""
        with self._lock:
            self._published[number] = _Published(begun, time.monotonic(), self._volume, once)

    def withheld(self, number: int) -> None:
        """A document that was sent and must never be found."""
        with self._lock:
            self._published[number] = _Published(UNDER_WAY, UNDER_WAY, self._volume, True)

    def begin_wipe(self, snapshot: Interval | None = None) -> Wipe:
        with self._lock:
            wipe = Wipe(time.monotonic(), snapshot)
            self._wipes.append(wipe)
            return wipe

    def end_wipe(self, wipe: Wipe, done: bool | None) -> None:
        """done: None where the service did not say."""
        with self._lock:
            if done is False:
                self._wipes.remove(wipe)
            else:
                wipe.ended, wipe.certain = time.monotonic(), done is True

    def begin_end_of_sessions(self) -> None:
        """Before a call that ends sessions."""
        self._sessions_ended = UNDER_WAY

    def sessions_have_ended(self) -> None:
        self._sessions_ended = time.monotonic()

    def sessions_ended_since(self, moment: float) -> bool:
        """Whether a call may have ended sessions after `moment`."""
        return self._sessions_ended >= moment

    def sample(self, count: int, rng: random.Random) -> list[int]:
        """Numbers of documents that something is known of, the newest among them."""
        with self._lock:
            numbers = list(self._published)
        newest = numbers[-(count // 4) :] if count >= 4 else []
        return [*newest, *rng.sample(numbers, min(len(numbers), count - len(newest)))]

    def found(self, number: int, asked: float) -> bool | None:
        """Whether a query that was sent at `asked` and has been answered finds the document; None: it may or may not."""
        answered = time.monotonic()
        with self._lock:
            published = self._published[number]
            if any(wipe.overlaps(asked, answered) for wipe in self._wipes):
                return None
            held = self._held(published, asked)
            if held:
                return True if self._volume - published.volume <= self._bound else None
            return None if not published.once else held

    def history(self, number: int) -> str:
        """What is known of a document, for a report; seconds before now."""
        now = time.monotonic()
        with self._lock:
            published, wipes = self._published[number], self._wipes[-5:]
        written = (
            "not to be stored"
            if published.begun == UNDER_WAY
            else f"stored {now - published.begun:.2f} to {now - published.ended:.2f} s ago"
        )
        return "; ".join([written, *(wipe.described(now) for wipe in wipes)])

    def _held(self, published: _Published, moment: float) -> bool | None:
        """At a moment at which no wipe was under way."""
        if published.begun >= moment:
            return False
        if published.ended > moment:
            return None
        for wipe in reversed([wipe for wipe in self._wipes if wipe.begun < moment]):
            if wipe.ended <= published.begun:
                return True
            if wipe.begun < published.ended:
                return None
            after = False if wipe.snapshot is None else self._held_throughout(published, *wipe.snapshot)
            if wipe.certain:
                return after
            before = self._held(published, wipe.begun)
            return after if before is after else None
        return True

    def _held_throughout(self, published: _Published, begun: float, ended: float) -> bool | None:
        """In an interval in which a snapshot was taken."""
        if published.begun < ended and published.ended > begun:
            return None
        return self._held(published, begun)
