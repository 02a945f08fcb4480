"""One service as a drafter sees it: its stream and its circuit breaker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from datastore_service.client import metrics
from datastore_service.client.base import DatastoreError
from datastore_service.client.breaker import BreakerState, CircuitBreaker
from datastore_service.client.remote import DeadlineMissedError, GrpcDatastore, StepState
from datastore_service.protocol.types import Entry, Reply

log = logging.getLogger(__name__)


class Link:
    """Never raises DatastoreError. Calls come from one thread.

    name: the endpoint, used in log lines and for affinity."""

    def __init__(self, name: str, stream: GrpcDatastore, breaker: CircuitBreaker | None = None) -> None:
        self.name = name
        self.breaker = breaker or CircuitBreaker()
        self._stream = stream
        self._probe: int | None = None  # step number of the probe that has been sent
        self._reported_open = False
        metrics.BREAKER_OPEN.labels(name).set(0)

    @property
    def allows_calls(self) -> bool:
        """Whether steps may call the service."""
        return self.breaker.allows_calls

    @property
    def usable(self) -> bool:
        """Whether sessions can be assigned to the service: steps may call it, and a stream is open."""
        return self.breaker.allows_calls and not self._stream.disconnect_reason

    @property
    def wants_rejected(self) -> bool:
        return self._stream.wants_rejected

    def submit(self, entries: Sequence[Entry]) -> int | None:
        """Sends a step; returns its number for `collect`, None if it cannot be sent."""
        try:
            return self._stream.submit(entries)
        except DatastoreError as error:
            self._failed("unreachable", error)
            return None

    def collect(self, step: int, entries: Sequence[Entry], until: float) -> list[Reply] | None:
        """The replies to a step of these entries, None if they do not arrive by `until` (of time.monotonic())."""
        try:
            replies = self._stream.collect(step, entries, until)
        except DeadlineMissedError as error:
            self._failed("deadline", error)
            return None
        except DatastoreError as error:
            self._failed("unreachable", error)
            return None
        self.breaker.succeeded()
        self._report_transition("answers in time")
        return replies

    def post(self, entries: Sequence[Entry]) -> bool:
        """Sends entries even while steps may not call the service. False: no stream is open, they are lost."""
        try:
            self._stream.send(entries)
        except DatastoreError as error:
            log.debug("datastore %s: post dropped: %s", self.name, error)
            return False
        return True

    def probe(self) -> None:
        """Called at each step while steps may not call the service. Sends a probe, an empty step that nobody waits for, or
        checks whether the last probe has been answered.

        While no stream is open a probe stays due, so the first step after a new connection sends one.
        """
        if self._probe is not None:
            state = self._stream.state_of(self._probe)
            if state is not StepState.PENDING:
                self._probe = None
            if state is StepState.ANSWERED:
                self.breaker.probe_answered()
        elif self.breaker.probe_due and not self._stream.disconnect_reason:
            self._send_probe()

    def close(self) -> None:
        self._stream.close()

    def _send_probe(self) -> None:
        try:
            self._probe = self._stream.submit(())
        except DatastoreError as error:
            log.debug("datastore %s: no probe: %s", self.name, error)

    def _failed(self, reason: str, error: DatastoreError) -> None:
        metrics.FAILURES.labels(reason).inc()
        self.breaker.failed()
        self._report_transition(str(error))

    def _report_transition(self, why: str) -> None:
        """Logs one line when the breaker opens and one when it closes."""
        opened = not self.breaker.allows_calls
        if opened and not self._reported_open:
            log.warning("datastore %s: %s; not asked until it answers again", self.name, why)
        if self.breaker.state is BreakerState.CLOSED and self._reported_open:
            log.warning("datastore %s: %s; asked again", self.name, why)
        if self.breaker.state is not BreakerState.HALF_OPEN:
            self._reported_open = opened
        metrics.BREAKER_OPEN.labels(self.name).set(opened)
