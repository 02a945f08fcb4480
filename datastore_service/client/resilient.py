"""Drafts whatever happens to the services: deadline, circuit breakers, local fallback, resynchronisation."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from datastore_service.client import metrics
from datastore_service.client.affinity import affinity_key, ranked
from datastore_service.client.base import Datastore
from datastore_service.client.link import Link
from datastore_service.client.token_log import TokenLog
from datastore_service.engine.engine import Engine
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Entry, Reply, Status

log = logging.getLogger(__name__)


class ResilientDatastore(Datastore):
    """`step` never raises DatastoreError and never waits past the deadline.

    The local engine drafts from the sessions alone (prompt lookup). It does so while the services work on their own
    answers, so a missed deadline costs no further time: its trees are ready. A reply that shows a session lost by its
    service takes the local tree and has the session sent again; callers see UNKNOWN_SESSION or GAP only for sessions
    which they have not told of themselves.

    A session stays with one service, by affinity one of those that answer when it opens. When that one stops answering
    and another does not, the session is sent there whole.

    links: the services, at least one. vocab_size: token ids from here on (images, say) are nothing to look up; their
    sessions get empty trees.
    """

    def __init__(self, links: Sequence[Link], local: Engine, vocab_size: int) -> None:
        self.links = {link.name: link for link in links}
        self._local = local
        self._vocab_size = vocab_size
        self._texts = TokenLog()
        self._placed: dict[str, Link] = {}
        self._skipped: set[str] = set()
        self._earlier: set[str] = set()  # links that do not know queries

    @property
    def wants_rejected(self) -> bool:
        return any(link.wants_rejected for link in self.links.values())

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        started = time.monotonic()
        accepted = [self._accepts(entry) for entry in entries]
        wanted = [entry for entry, accept in zip(entries, accepted, strict=True) if accept]
        replies = iter(self._draft(wanted, started + deadline) if wanted else ())
        metrics.STEP_SECONDS.observe(time.monotonic() - started)
        return [
            next(replies) if accept else _no_draft(entry)
            for entry, accept in zip(entries, accepted, strict=True)
        ]

    def post(self, entries: Sequence[Entry]) -> None:
        wanted = [entry for entry in entries if self._accepts(entry)]
        self._record(wanted)
        for link, rows in self._shares(wanted):
            share = [wanted[row] for row in rows]
            if link.asks:
                link.post(share)
            else:
                _tell_closings(link, share)
        if wanted:
            self._local.step([_private(entry) for entry in wanted])

    def close(self) -> None:
        for link in self.links.values():
            link.close()

    def _draft(self, entries: list[Entry], until: float) -> list[Reply]:
        self._record(entries)
        shares = [(link, rows, [entries[row] for row in rows]) for link, rows in self._shares(entries)]
        steps = [self._ask(link, share) for link, _, share in shares]
        replies = self._local.step([_private(entry) for entry in entries])
        for (link, rows, share), step in zip(shares, steps, strict=True):
            remote = None if step is None else link.collect(step, len(share), until)
            for at, row in enumerate(rows):
                reply = remote[at] if remote else None
                if entries[row].expected:
                    _count_takeover(reply)
                replies[row] = self._choose(link, entries[row], reply, replies[row])
        return replies

    def _record(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._texts.apply(entry)

    # Which service has which session

    def _shares(self, entries: list[Entry]) -> list[tuple[Link, Sequence[int]]]:
        """The links of the entries' sessions, each with the rows of its entries."""
        for link in self.links.values():
            if not link.asks:
                link.probe()
        if len(self.links) == 1:
            return [(link, range(len(entries))) for link in self.links.values() if entries]
        rows: dict[str, list[int]] = {}
        for row, entry in enumerate(entries):
            rows.setdefault(self._place(entry).name, []).append(row)
        return [(self.links[name], share) for name, share in rows.items()]

    def _place(self, entry: Entry) -> Link:
        link = self._placed.get(entry.session)
        if link is None or not link.usable:
            link = self._move(entry, link)
        if entry.closing:
            self._placed.pop(entry.session, None)
        else:
            self._placed[entry.session] = link
        return link

    def _move(self, entry: Entry, old: Link | None) -> Link:
        """To the first service of the session's that answers; stays, if none does."""
        order = ranked(affinity_key(entry, self._texts.opening(entry.session)), self.links)
        usable = [self.links[name] for name in order if self.links[name].usable]
        if not usable:
            return old or self.links[order[0]]
        if old is not None:
            metrics.MOVES.inc()
            old.post([Entry(entry.session, closing=True)])  # it may be there, only slow
            missing = self._texts.missing(entry.session, 0)
            if missing is not None:
                usable[0].post([missing])
        return usable[0]

    def _ask(self, link: Link, entries: list[Entry]) -> int | None:
        """Sends the step; None if the service is not asked or cannot be."""
        if not link.asks:
            _tell_closings(link, entries)
            return None
        return link.submit(entries)

    def _choose(self, link: Link, entry: Entry, remote: Reply | None, local: Reply) -> Reply:
        if remote is None:
            return _fallen_back(local)
        if remote.status is Status.OK and len(remote.trees) == len(entry.queries):
            return remote
        if remote.status is Status.OK:
            return self._answered_here(link, remote, local)
        if remote.status is not Status.OVER_BUDGET:
            self._resend(link, entry.session, remote.known if remote.status is Status.GAP else 0)
        return _fallen_back(local)

    def _answered_here(self, link: Link, remote: Reply, local: Reply) -> Reply:
        """Of a service of an earlier version, which passes over queries."""
        if link.name not in self._earlier:
            self._earlier.add(link.name)
            log.warning(
                "datastore %s: does not answer queries; they are answered from sessions alone", link.name
            )
        metrics.FALLBACK_DRAFTS.inc(_drafted(local.trees))
        return replace(remote, trees=local.trees)

    def _resend(self, link: Link, session: str, known: int) -> None:
        missing = self._texts.missing(session, known)
        if missing is not None:
            metrics.RESYNCS.inc()
            link.post([missing])

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
        for link, _ in self._shares([closing]):
            link.post([closing])


def _tell_closings(link: Link, entries: Sequence[Entry]) -> None:
    """To a service that is not asked: it must not keep what the worker has dropped."""
    closings = [Entry(entry.session, closing=True) for entry in entries if entry.closing]
    if closings:
        link.post(closings)


def _count_takeover(reply: Reply | None) -> None:
    """Whether a session that another instance had begun was there for the first step."""
    held = "unanswered" if reply is None else "held" if reply.status is Status.OK else "missing"
    metrics.TAKEOVERS.labels(held).inc()


def _within(tokens: np.ndarray, vocab_size: int) -> bool:
    return len(tokens) == 0 or bool(tokens.min() >= 0 and tokens.max() < vocab_size)


def _private(entry: Entry) -> Entry:
    """For the local engine: nothing of a session survives it there."""
    if entry.opening is None:
        return entry
    return replace(entry, opening=replace(entry.opening, conversation="", publish=False))


def _fallen_back(reply: Reply) -> Reply:
    metrics.FALLBACK_DRAFTS.inc(_drafted((reply.tree, *reply.trees)))
    return reply


def _drafted(trees: Sequence[DraftTree]) -> int:
    return sum(1 for tree in trees if len(tree))


def _no_draft(entry: Entry) -> Reply:
    return Reply(Status.OK, entry.start + len(entry.tokens), EMPTY_TREE, (EMPTY_TREE,) * len(entry.queries))
