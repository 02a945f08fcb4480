"""How much faster the draft model is than the target, as the draft side sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sglang_patches.ledger.rates import RunningMean

RATE = 0.05  # of the running means


class SpeedRatio:
    """C = T_p / T_q: seconds of a verification over those of a draft forward, both as the draft side sees them. now: seconds by a
    steady clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._verification, self._forward = RunningMean(RATE, alike=1), RunningMean(RATE, alike=1)  # seconds

    def now(self) -> float:
        return self._now()

    @property
    def value(self) -> float:
        """Infinite until both are measured."""
        verification, forward = self._verification.value, self._forward.value
        return verification / forward if verification and forward else math.inf

    def verification_took(self, seconds: float) -> None:
        self._verification.add(seconds)

    def forward_took(self, seconds: float) -> None:
        self._forward.add(seconds)
