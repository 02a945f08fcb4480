"""Which streams hold which session. A session outlives a broken stream for a limited time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection


class Leases:
    """Each stream that has named a session holds it, except one that hands it over. The session stays open as long as a
    stream holds it. Thread-safe. Times are seconds of one monotonic clock."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._lock = threading.Lock()
        self._held: dict[int, set[str]] = {}  # by stream
        self._ends: dict[int, float] = {}  # broken stream -> when it stops holding its sessions
        self._unclaimed: dict[
            str, float
        ] = {}  # session handed over, not held by a stream yet -> when it is closed

    def name(
        self,
        stream: int,
        sessions: set[str],
        open_of: Callable[[set[str]], set[str]],
        handed_over: Collection[str] = (),
        now: float = 0.0,
    ) -> None:
        """Notes that a stream's message has named sessions. The stream holds those that are open, except those that it
        hands over: they wait for another stream, unless one holds them already. No stream holds a session that is not open.

        open_of: those of the sessions that are open; called under the lock, so that no stream holds a session that another stream
        closes meanwhile. now: required with `handed_over`."""
        with self._lock:
            opened = open_of(sessions)
            for session in sessions - opened:
                self._release(session)
            held = opened.difference(handed_over)
            self._held.setdefault(stream, set()).update(held)
            if self._unclaimed:
                for session in held:
                    self._unclaimed.pop(session, None)
            for session in opened.intersection(handed_over):
                if not any(session in others for others in self._held.values()):
                    self._unclaimed[session] = now + self._grace

    def release(self, session: str) -> None:
        with self._lock:
            self._release(session)

    def stream_broke(self, stream: int, now: float) -> None:
        with self._lock:
            self._ends[stream] = now + self._grace

    def take_expired(self, now: float) -> list[str]:
        """The sessions that no stream has claimed in time. They are no longer held."""
        with self._lock:
            unclaimed = [session for session, end in self._unclaimed.items() if end <= now]
            for session in unclaimed:
                del self._unclaimed[session]
            over = [stream for stream, end in self._ends.items() if end <= now]
            if not over:
                return unclaimed
            expired: set[str] = set()
            for stream in over:
                del self._ends[stream]
                expired |= self._held.pop(stream, set())
            return unclaimed + sorted(expired.difference(*self._held.values()))

    def _release(self, session: str) -> None:
        self._unclaimed.pop(session, None)
        for held in self._held.values():
            held.discard(session)
