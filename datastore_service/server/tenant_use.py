"""What one tenant has of what its quota bounds. Every session, stream and text that it asks for is admitted here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import LIVE_TOKEN
from datastore_service.engine.share import NoRoomError
from datastore_service.storage.quota_file import PARTS, Quota

Clock = Callable[[], float]


class TenantUse:
    """The share (`engine.share.Share`) of all engines of a tenant, and the count of its streams. Thread-safe.

    quota: in force; a lower one than what the tenant has closes and deletes nothing. refused: how often each of its parts has refused
    something, or made a message wait. clock: seconds, never back."""

    def __init__(self, tenant: str, clock: Clock = time.monotonic) -> None:
        self.tenant, self.quota = tenant, Quota()
        self.refused = dict.fromkeys(PARTS, 0)
        self._lock = threading.Lock()
        self._engines: WeakSet[Engine] = WeakSet()
        self._sessions = self._streams = 0
        self._adding = 0  # tokens on their way into live tiers
        self._outputs, self._messages = _Rate(clock), _Rate(clock)

    def count_text_of(self, engine: Engine) -> None:
        """Counts the live text of an engine, for as long as somebody uses the engine."""
        self._engines.add(engine)

    def used(self) -> dict[str, int]:
        """What the tenant has of each part that is not a rate."""
        return {
            "live_bytes": self._live_tokens() * LIVE_TOKEN,
            "sessions": self._sessions,
            "streams": self._streams,
        }

    def open_session(self) -> None:
        with self._lock:
            self._check("sessions", self._sessions + 1)
            self._sessions += 1

    def may_open_session(self) -> bool:
        limit = self.quota.sessions
        return limit is None or self._sessions < limit

    def end_sessions(self, count: int) -> None:
        with self._lock:
            self._sessions -= count

    def begin_stream(self) -> None:
        """Raises NoRoomError, and then has not counted it."""
        with self._lock:
            self._check("streams", self._streams + 1)
            self._streams += 1

    def end_stream(self) -> None:
        with self._lock:
            self._streams -= 1

    def turn(self) -> float:
        """Seconds that the next message of the tenant's streams has to wait for its turn."""
        rate = self.quota.messages_per_second
        if rate is None:
            return 0.0
        with self._lock:
            wait = self._messages.wait(rate)
            self.refused["messages_per_second"] += wait > 0
        return wait

    @contextmanager
    def adding(self, tokens: int, outputs: int = 0) -> Iterator[None]:
        with self._lock:
            self._check_text(tokens, outputs)
            self._adding += tokens
        try:
            yield
        finally:  # counted twice for a moment, so that the quota is never exceeded
            with self._lock:
                self._adding -= tokens

    def _check_text(self, tokens: int, outputs: int) -> None:
        if self.quota.live_bytes is not None and tokens:
            self._check("live_bytes", (self._live_tokens() + self._adding + tokens) * LIVE_TOKEN)
        rate = self.quota.outputs_per_second
        if rate is not None and not self._outputs.admits(outputs, rate):
            self._refuse("outputs_per_second", f"more than {rate}")

    def _live_tokens(self) -> int:
        return sum(engine.live_tokens for engine in self._engines)

    def _check(self, part: str, wanted: int) -> None:
        limit = getattr(self.quota, part)
        if limit is not None and wanted > limit:
            self._refuse(part, f"{wanted} exceeds {limit}")

    def _refuse(self, part: str, excess: str) -> None:
        self.refused[part] += 1
        raise NoRoomError(f"{part}: {excess}, the quota of tenant {self.tenant!r}")


class _Rate:
    """Admits so many a second. Those of one second may come at once (a token bucket)."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._seen, self._left = clock, clock(), float("inf")

    def admits(self, count: int, rate: int) -> bool:
        self._refill(rate)
        if count > self._left:
            return False
        self._left -= count
        return True

    def wait(self, rate: int) -> float:
        """Seconds until one more is admitted, which is counted at once."""
        self._refill(rate)
        self._left -= 1
        return max(0.0, -self._left / rate)

    def _refill(self, rate: int) -> None:
        now = self._clock()
        self._left = min(rate, self._left + (now - self._seen) * rate)
        self._seen = now
