"""Which stream holds which session, so that sessions outlive a broken stream for a while but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Leases:
    """A session belongs to the last stream that named it. Thread-safe; times are seconds of one monotonic clock."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._lock = threading.Lock()
        self._holder: dict[str, int] = {}
        self._ends: dict[int, float] = {}  # broken stream -> when its sessions are to be closed

    def hold(self, stream: int, sessions: Iterable[str]) -> None:
        with self._lock:
            self._holder.update(dict.fromkeys(sessions, stream))

    def release(self, session: str) -> None:
        with self._lock:
            self._holder.pop(session, None)

    def stream_broke(self, stream: int, now: float) -> None:
        with self._lock:
            self._ends[stream] = now + self._grace

    def take_expired(self, now: float) -> list[str]:
        """The sessions nobody came back for; they are no longer held."""
        with self._lock:
            over = {stream for stream, end in self._ends.items() if end <= now}
            if not over:
                return []
            expired = [session for session, stream in self._holder.items() if stream in over]
            for session in expired:
                del self._holder[session]
            for stream in over:
                del self._ends[stream]
            return expired
