"""Which stream holds which session, so that sessions outlive a broken stream for a while but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Leases:
    """A session belongs to the last stream that named it, but for one that hands it over. Thread-safe; times are seconds
    of one monotonic clock."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._lock = threading.Lock()
        self._holder: dict[str, int] = {}
        self._ends: dict[int, float] = {}  # broken stream -> when its sessions are to be closed
        self._unclaimed: dict[str, float] = {}  # handed over, held by no stream yet -> when to be closed

    def hold(self, stream: int, sessions: Iterable[str]) -> None:
        held = dict.fromkeys(sessions, stream)
        with self._lock:
            self._holder.update(held)
            if self._unclaimed:
                for session in held:
                    self._unclaimed.pop(session, None)

    def hand_over(self, sessions: Iterable[str], now: float) -> None:
        """Sessions that another stream goes on with, if it has not begun to already."""
        with self._lock:
            for session in sessions:
                if session not in self._holder:
                    self._unclaimed[session] = now + self._grace

    def release(self, session: str) -> None:
        with self._lock:
            self._holder.pop(session, None)
            self._unclaimed.pop(session, None)

    def stream_broke(self, stream: int, now: float) -> None:
        with self._lock:
            self._ends[stream] = now + self._grace

    def take_expired(self, now: float) -> list[str]:
        """The sessions nobody came back for; they are no longer held."""
        with self._lock:
            unclaimed = [session for session, end in self._unclaimed.items() if end <= now]
            for session in unclaimed:
                del self._unclaimed[session]
            over = {stream for stream, end in self._ends.items() if end <= now}
            if not over:
                return unclaimed
            expired = [session for session, stream in self._holder.items() if stream in over]
            for session in expired:
                del self._holder[session]
            for stream in over:
                del self._ends[stream]
            return unclaimed + expired
