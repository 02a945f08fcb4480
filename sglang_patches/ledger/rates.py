"""How often something comes true, and how long something takes, learned while serving."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

# Most servers run fewer requests at once: there no running request's tenant is forgotten.
MOST_TENANTS = 1024
SPEED_RATE = 0.05  # of the running means of a `SpeedRatio`

Learned = TypeVar("Learned")
Cells = int | tuple[int, ...] | tuple[np.ndarray, ...]  # one cell of a table, or several


def per_tenant(make: Callable[[], Learned]) -> Callable[[str], Learned]:
    """What is learned from one tenant's requests, apart from what is learned from another's: made at its first use. Of more than
    MOST_TENANTS the one used least recently is forgotten: names come from requests, so there is no end of them."""
    return functools.lru_cache(MOST_TENANTS)(lambda tenant: make())


class RateTable:
    """Rates by cell: how many of a cell's cases came true.

    prior: float64, what is believed of each cell before its first case.
    weight: cases that the belief counts for.
    memory: cases that a cell follows; when it has had more, both its counts are halved.
    """

    def __init__(self, prior: np.ndarray, weight: float, memory: float = math.inf) -> None:
        self._seen = np.full(prior.shape, weight)
        self._came = weight * prior
        self._memory = memory

    def rates(self, cells: Cells, weight: float = 0.0, prior: np.ndarray | float = 0.0) -> np.ndarray:
        """float64, the rate of each cell.

        prior: a further belief, which counts for `weight` cases.
        """
        return (self._came[cells] + weight * prior) / (self._seen[cells] + weight)

    def learn(self, cells: Cells, came: np.ndarray | bool) -> None:
        """Adds a case to each cell; a cell that is named twice has two.

        came: whether each came true.
        """
        np.add.at(self._seen, cells, 1.0)
        np.add.at(self._came, cells, np.asarray(came, np.float64))
        if self._memory < math.inf:
            full = self._seen > self._memory
            self._seen[full] /= 2
            self._came[full] /= 2

    def doubt(self, cases: float) -> None:
        """What a cell has learned counts for so many cases at most."""
        share = np.minimum(1.0, cases / self._seen)
        self._seen *= share
        self._came *= share


class RunningMean:
    """The mean of the first values, and a running one after them.

    rate: weight of a new value in the running one.
    alike: values that count alike, before it runs.
    """

    def __init__(self, rate: float, alike: int) -> None:
        self._rate, self._alike = rate, alike
        self.count, self.value = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        weight = 1 / self.count if self.count <= self._alike else self._rate
        self.value += (value - self.value) * weight

    def from_prior(self, value: float, weight: float) -> float:
        """The mean of the values and of `weight` more of this one."""
        return (weight * value + self.count * self.value) / (weight + self.count)


class SpeedRatio:
    """C = T_p / T_q: seconds of a verification over those of a draft forward, both as the draft side sees them. now: seconds by a
    steady clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._verification = RunningMean(SPEED_RATE, alike=1)  # seconds
        self._forward = RunningMean(SPEED_RATE, alike=1)

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
