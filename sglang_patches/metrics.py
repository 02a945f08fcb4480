"""Metrics of decode steps, in prometheus-client's default registry: SGLang's /metrics shows them."""

import functools
import time

from prometheus_client import Counter, Summary

# Where the worker's own time goes. On a GPU "forward" is the launch alone: what the device computes meanwhile shows in the
# time of the whole step.
PHASES = ("draft", "prepare", "forward", "learn", "verify", "commit", "extend")
RETRIEVE = "retrieve"  # the part of "draft" that waits for the datastore
PHASE_SECONDS = Counter(
    "specstore_decode_phase_seconds",
    "The worker's own time by phase of a decode step; retrieve is the part of draft that waits for the datastore, extend is a head that reads "
    "what was accepted. On a GPU forward is the launch alone",
    ["phase"],
)
STEP_SECONDS = Summary(
    "specstore_decode_step_seconds",
    "Time from a decode step's launch to the next one's, by requests (batch, rounded up to a power of two) and rows of each (width, the mean "
    "rounded up)",
    ["batch", "width"],
)


class PhaseClock:
    """Times the phases of one step: each `end` ends a phase and begins the next.

    counted: whether the metric gets them.
    """

    _seconds = {phase: PHASE_SECONDS.labels(phase) for phase in (*PHASES, RETRIEVE)}

    def __init__(self, counted: bool = True) -> None:
        self._counted, self._began = counted, time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        if self._counted:
            self._seconds[phase].inc(now - self._began)
        self._began = now


def observe_step(batch: int, rows: int, seconds: float) -> None:
    """A decode step of `batch` requests has finished.

    rows: of all.
    """
    _step_seconds(batch, -(-rows // batch)).observe(seconds)


@functools.cache  # a label's look-up costs more than the observation
def _step_seconds(batch: int, width: int) -> Summary:
    return STEP_SECONDS.labels(1 << (batch - 1).bit_length(), width)
