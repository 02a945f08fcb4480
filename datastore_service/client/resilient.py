"""Drafts whatever happens to the service: deadline, circuit breaker, local fallback, resynchronisation."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from datastore_service.client import metrics
from datastore_service.client.base import Datastore, DatastoreError
from datastore_service.client.breaker import BreakerState, CircuitBreaker
from datastore_service.client.remote import DeadlineMissedError, Fate, GrpcDatastore
from datastore_service.client.token_log import TokenLog
from datastore_service.engine.engine import Engine
from datastore_service.engine.tree import EMPTY_TREE
from datastore_service.engine.types import Entry, Reply, Status

log = logging.getLogger(__name__)


class ResilientDatastore(Datastore):
    """`step` never raises DatastoreError and never waits past the deadline.

    The local engine drafts from the sessions alone (prompt lookup). It does so while the service works on its own
    answer, so a missed deadline costs no further time: its trees are ready. A reply that shows a session lost by the
    service takes the local tree and has the session sent again; callers see UNKNOWN_SESSION or GAP only for sessions
    which they have not told of themselves.

    vocab_size: token ids from here on (images, say) are nothing to look up; their sessions get empty trees.
    """

    def __init__(
        self, primary: GrpcDatastore, local: Engine, vocab_size: int, breaker: CircuitBreaker | None = None
    ) -> None:
        self._primary = primary
        self._local = local
        self._vocab_size = vocab_size
        self._breaker = breaker or CircuitBreaker()
        self._texts = TokenLog()
        self._skipped: set[str] = set()
        self._probe: int | None = None  # the step number of the probe under way
        self._reported_open = False
        metrics.BREAKER_OPEN.set(0)

    @property
    def breaker_state(self) -> BreakerState:
        return self._breaker.state

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        started = time.monotonic()
        accepted = [self._accepts(entry) for entry in entries]
        wanted = [entry for entry, accept in zip(entries, accepted, strict=True) if accept]
        replies = iter(self._draft(wanted, started, deadline) if wanted else ())
        metrics.STEP_SECONDS.observe(time.monotonic() - started)
        return [
            next(replies) if accept else _no_draft(entry)
            for entry, accept in zip(entries, accepted, strict=True)
        ]

    def post(self, entries: Sequence[Entry]) -> None:
        wanted = [entry for entry in entries if self._accepts(entry)]
        self._record(wanted)
        if not wanted:
            return
        if self._breaker.asks:
            self._primary.post(wanted)
        else:
            self._tell_closings(wanted)
        self._local.step([_private(entry) for entry in wanted])

    def close(self) -> None:
        self._primary.close()

    def _draft(self, entries: list[Entry], started: float, deadline: float) -> list[Reply]:
        self._record(entries)
        step = self._ask(entries, deadline)
        local = self._local.step([_private(entry) for entry in entries])
        remote = None if step is None else self._hear(step, len(entries), started + deadline)
        if remote is None:
            return [_fallen_back(reply) for reply in local]
        return [self._choose(*each) for each in zip(entries, remote, local, strict=True)]

    def _record(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._texts.apply(entry)

    def _ask(self, entries: list[Entry], deadline: float) -> int | None:
        """Sends the step; None if the service is not asked or cannot be."""
        if not self._breaker.asks:
            self._continue_probe()
            self._tell_closings(entries)
            return None
        try:
            return self._primary.submit(entries)
        except DatastoreError as error:
            self._failed("unreachable", error)
            return None

    def _hear(self, step: int, size: int, until: float) -> list[Reply] | None:
        try:
            replies = self._primary.collect(step, until)
            if len(replies) != size:
                raise DatastoreError(f"{len(replies)} replies to {size} entries")
        except DeadlineMissedError as error:
            self._failed("deadline", error)
            return None
        except DatastoreError as error:
            self._failed("unreachable", error)
            return None
        self._breaker.succeeded()
        self._note_transition("answers in time")
        return replies

    def _failed(self, reason: str, error: DatastoreError) -> None:
        metrics.FAILURES.labels(reason).inc()
        self._breaker.failed()
        self._note_transition(str(error))

    def _continue_probe(self) -> None:
        """Sends a probe, an empty step which nobody waits for, or looks after the one sent some decode steps ago.

        While there is no connection a probe stays due, so that the first step after it is back sends one.
        """
        if self._probe is not None:
            fate = self._primary.fate(self._probe)
            if fate is not Fate.PENDING:
                self._probe = None
            if fate is Fate.ANSWERED:
                self._breaker.probe_answered()
        elif self._breaker.probe_due and not self._primary.trouble:
            self._send_probe()

    def _send_probe(self) -> None:
        try:
            self._probe = self._primary.submit(())
        except DatastoreError as error:
            log.debug("datastore: no probe: %s", error)

    def _note_transition(self, why: str) -> None:
        """One log line when the service stops being asked and one when it is relied on again."""
        opened = not self._breaker.asks
        if opened and not self._reported_open:
            log.warning("datastore: %s; drafting from the sessions alone until it answers again", why)
        if self._breaker.state is BreakerState.CLOSED and self._reported_open:
            log.warning("datastore: %s; drafting from it again", why)
        if self._breaker.state is not BreakerState.HALF_OPEN:
            self._reported_open = opened
        metrics.BREAKER_OPEN.set(opened)

    def _tell_closings(self, entries: list[Entry]) -> None:
        """Also while the service is not asked: it must not keep what the worker has dropped."""
        closings = [Entry(entry.session, closing=True) for entry in entries if entry.closing]
        if closings:
            self._primary.post(closings)

    def _choose(self, entry: Entry, remote: Reply, local: Reply) -> Reply:
        if remote.status is Status.OK:
            return remote
        if remote.status is not Status.OVER_BUDGET:
            self._resend(entry.session, remote.known if remote.status is Status.GAP else 0)
        return _fallen_back(local)

    def _resend(self, session: str, known: int) -> None:
        missing = self._texts.missing(session, known)
        if missing is not None:
            metrics.RESYNCS.inc()
            self._primary.post([missing])

    def _accepts(self, entry: Entry) -> bool:
        """Whether the entry's session is one to draft for; once refused, a session stays so until it closes."""
        session = entry.session
        if session not in self._skipped and _within(entry.tokens, self._vocab_size):
            return True
        if session not in self._skipped:
            self._skip(session)
        if entry.closing:
            self._skipped.discard(session)
        return False

    def _skip(self, session: str) -> None:
        """Forgets the session everywhere."""
        metrics.SKIPPED_SESSIONS.inc()
        log.info(
            "datastore: session %s has token ids outside [0, %d): not drafted for", session, self._vocab_size
        )
        self._skipped.add(session)
        closing = Entry(session, closing=True)
        self._texts.apply(closing)
        self._local.step([closing])
        self._primary.post([closing])


def _within(tokens: np.ndarray, vocab_size: int) -> bool:
    return len(tokens) == 0 or bool(tokens.min() >= 0 and tokens.max() < vocab_size)


def _private(entry: Entry) -> Entry:
    """For the local engine: nothing of a session survives it there."""
    if entry.opening is None:
        return entry
    return replace(entry, opening=replace(entry.opening, conversation="", publish=False))


def _fallen_back(reply: Reply) -> Reply:
    if len(reply.tree):
        metrics.FALLBACK_DRAFTS.inc()
    return reply


def _no_draft(entry: Entry) -> Reply:
    return Reply(Status.OK, entry.start + len(entry.tokens), EMPTY_TREE)
