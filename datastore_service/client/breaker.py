"""A circuit breaker for a service that may be slow or down."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"  # the service is called
    OPEN = "open"  # the service is not called
    HALF_OPEN = "half-open"  # the service is called; the next failure opens the breaker again


class CircuitBreaker:
    """Opens after `failures` failures in a row. A probe is due after a delay, which doubles each time it opens again.

    An answered probe half-opens it, however late the answer is: nobody waits for a probe, so on a busy machine it is
    slower than a step. The next step closes or opens it.

    first_delay, longest_delay: seconds from opening to a probe. clock: seconds, monotonic.
    """

    def __init__(
        self,
        failures: int = 3,
        first_delay: float = 0.25,
        longest_delay: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = BreakerState.CLOSED
        self._limit = failures
        self._first_delay, self._longest_delay = first_delay, longest_delay
        self._clock = clock
        self._failed = 0
        self._delay = first_delay
        self._probe_at = 0.0

    @property
    def allows_calls(self) -> bool:
        """Whether steps may call the service."""
        return self.state is not BreakerState.OPEN

    @property
    def probe_due(self) -> bool:
        return self.state is BreakerState.OPEN and self._clock() >= self._probe_at

    def succeeded(self) -> None:
        """A step was answered in time."""
        self._failed = 0
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED
            self._delay = self._first_delay

    def failed(self) -> None:
        """A step was not answered in time."""
        self._failed += 1
        if self.state is BreakerState.HALF_OPEN or self._failed >= self._limit:
            self._open()

    def probe_answered(self) -> None:
        """A probe was answered: the next step may call the service."""
        self.state = BreakerState.HALF_OPEN

    def _open(self) -> None:
        self.state = BreakerState.OPEN
        self._probe_at = self._clock() + self._delay
        self._delay = min(2 * self._delay, self._longest_delay)
