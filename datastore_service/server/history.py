"""The last hour of every namespace's counters, for the status page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from datastore_service.engine.stats import EngineStats
from datastore_service.protocol.types import Namespace
from datastore_service.server.namespaces import Namespaces

SAMPLE_SECONDS = 20.0
SAMPLES = 180


@dataclass(frozen=True, slots=True)
class Sample:
    """The stats of all namespaces at one moment.

    at: seconds, of time.monotonic()."""

    at: float
    stats: dict[Namespace, EngineStats]


class History:
    """Keeps the last SAMPLES samples of all namespaces' stats.

    samples: oldest first. The tuple is replaced as a whole, so readers need no lock."""

    def __init__(self, namespaces: Namespaces, clock: Callable[[], float] = time.monotonic) -> None:
        self._namespaces, self._clock = namespaces, clock
        self.samples: tuple[Sample, ...] = ()

    def tick(self) -> None:
        """Takes a sample if one is due. One thread calls it, more often than samples are due."""
        now = self._clock()
        if self.samples and now - self.samples[-1].at < SAMPLE_SECONDS:
            return
        stats = {hosted.namespace: hosted.engine.stats() for hosted in self._namespaces}
        self.samples = (*self.samples[1 - SAMPLES :], Sample(now, stats))

    def of(self, namespace: Namespace) -> list[tuple[float, EngineStats]]:
        """(seconds ago, counters) of each sample that has the namespace, oldest first."""
        now = self._clock()
        return [(now - s.at, s.stats[namespace]) for s in self.samples if namespace in s.stats]
