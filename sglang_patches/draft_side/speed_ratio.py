"""How much faster the draft model is than the target, as the draft side sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

RATE = 0.05  # of the running means


class SpeedRatio:
    """C = T_p / T_q: seconds of a verification over those of a draft forward, both as the draft side sees them. now: seconds by a
    steady clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._verification = self._forward = 0.0  # running means, in seconds; 0 before the first

    def now(self) -> float:
        return self._now()

    @property
    def value(self) -> float:
        """Infinite until both are measured."""
        return self._verification / self._forward if self._verification and self._forward else math.inf

    def verification_took(self, seconds: float) -> None:
        self._verification = _mean(self._verification, seconds)

    def forward_took(self, seconds: float) -> None:
        self._forward = _mean(self._forward, seconds)


def _mean(mean: float, value: float) -> float:
    return mean + RATE * (value - mean) if mean else value
