"""One service as a drafter sees it: its stream, and whether it is asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from datastore_service.client import metrics
from datastore_service.client.base import DatastoreError
from datastore_service.client.breaker import BreakerState, CircuitBreaker
from datastore_service.client.remote import DeadlineMissedError, Fate, GrpcDatastore
from datastore_service.protocol.types import Entry, Reply

log = logging.getLogger(__name__)


class Link:
    """Never raises DatastoreError. Calls come from one thread.

    name: the endpoint, in log lines and for affinity."""

    def __init__(self, name: str, stream: GrpcDatastore, breaker: CircuitBreaker | None = None) -> None:
        self.name = name
        self.breaker = breaker or CircuitBreaker()
        self._stream = stream
        self._probe: int | None = None  # the step number of the probe under way
        self._reported_open = False
        metrics.BREAKER_OPEN.labels(name).set(0)

    @property
    def asks(self) -> bool:
        """Whether the service is asked for drafts."""
        return self.breaker.asks

    @property
    def usable(self) -> bool:
        """Whether a session is in good hands there."""
        return self.breaker.asks and not self._stream.trouble

    @property
    def wants_rejected(self) -> bool:
        return self._stream.wants_rejected

    def submit(self, entries: Sequence[Entry]) -> int | None:
        """A step's number for `collect`; None if the service cannot be asked."""
        try:
            return self._stream.submit(entries)
        except DatastoreError as error:
            self._failed("unreachable", error)
            return None

    def collect(self, step: int, size: int, until: float) -> list[Reply] | None:
        """The replies to a step of `size` entries, None if they do not come until `until`."""
        try:
            replies = self._stream.collect(step, until)
            if len(replies) != size:
                raise DatastoreError(f"{len(replies)} replies to {size} entries")
        except DeadlineMissedError as error:
            self._failed("deadline", error)
            return None
        except DatastoreError as error:
            self._failed("unreachable", error)
            return None
        self.breaker.succeeded()
        self._note_transition("answers in time")
        return replies

    def post(self, entries: Sequence[Entry]) -> None:
        """Also while the service is not asked; lost while it is not there."""
        self._stream.post(entries)

    def probe(self) -> None:
        """While the service is not asked, called once a step: sends a probe, an empty step which nobody waits for, or
        looks after the one sent some steps ago.

        While there is no connection a probe stays due, so that the first step after it is back sends one.
        """
        if self._probe is not None:
            fate = self._stream.fate(self._probe)
            if fate is not Fate.PENDING:
                self._probe = None
            if fate is Fate.ANSWERED:
                self.breaker.probe_answered()
        elif self.breaker.probe_due and not self._stream.trouble:
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
        self._note_transition(str(error))

    def _note_transition(self, why: str) -> None:
        """One log line when the service stops being asked and one when it is relied on again."""
        opened = not self.breaker.asks
        if opened and not self._reported_open:
            log.warning("datastore %s: %s; not asked until it answers again", self.name, why)
        if self.breaker.state is BreakerState.CLOSED and self._reported_open:
            log.warning("datastore %s: %s; asked again", self.name, why)
        if self.breaker.state is not BreakerState.HALF_OPEN:
            self._reported_open = opened
        metrics.BREAKER_OPEN.labels(self.name).set(opened)
