"""A datastore that drafts even if services fail: deadline, circuit breakers, local fallback, resynchronisation."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from datastore_service.client import metrics
from datastore_service.client.base import Datastore, Texts
from datastore_service.client.link import Link
from datastore_service.client.placement import Placement
from datastore_service.engine.engine import Engine
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Entry, Opening, Reply, SessionName, Status

log = logging.getLogger(__name__)


class ResilientDatastore(Datastore):
    """`step` never raises DatastoreError and never waits past the deadline.

    The local engine drafts from the sessions alone (prompt lookup). It drafts while the services work, so its trees are
    ready when a deadline is missed. If a reply shows that its service has lost the session, the local tree is taken and
    the session is sent again. Callers see UNKNOWN_SESSION or GAP only for sessions that they have not sent themselves.

    A service that is not asked is told nothing of its sessions. What it missed of a session is sent after its next reply, which shows
    the gap, or with the session's last entry, if the service has not answered since.

    `Placement` decides which service has which session.

    links: the services, at least one.
    local: an engine without any text.
    texts: what the sessions were told with, entries of the call under way among it.
    """

    def __init__(self, links: Sequence[Link], local: Engine, texts: Texts) -> None:
        self.links = {link.name: link for link in links}
        self._local, self._texts = local, texts
        self._placement = Placement(self.links, self._texts)
        self._incomplete: set[SessionName] = set()  # sessions of which the service may lack entries
        self._without_queries: set[str] = set()  # links of services that do not know queries
        self._have_refused: set[str] = set()  # links of services that refused an entry

    @property
    def wants_rejected(self) -> bool:
        return any(link.wants_rejected for link in self.links.values())

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        if not entries:
            return []
        started = time.monotonic()
        replies = self._draft(entries, started + deadline)
        metrics.STEP_SECONDS.observe(time.monotonic() - started)
        return replies

    def post(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        for link, rows in self._by_link(entries):
            of_link = [self._complete(entries[row]) for row in rows]
            if not (link.allows_calls and link.post(of_link)):
                self._withhold(link, of_link)
        self._forget(entries)
        self._local.step([_for_local(entry) for entry in entries])

    def close(self) -> None:
        for link in self.links.values():
            link.close()

    def _draft(self, entries: Sequence[Entry], until: float) -> list[Reply]:
        batches = [(link, rows, [entries[row] for row in rows]) for link, rows in self._by_link(entries)]
        steps = [self._submit(link, batch) for link, _, batch in batches]
        self._forget(entries)  # what has ended is not sent again, whatever the reply
        replies = self._local.step([_for_local(entry) for entry in entries])
        for (link, rows, batch), step in zip(batches, steps, strict=True):
            remote = None if step is None else link.collect(step, batch, until)
            for at, row in enumerate(rows):
                reply = remote[at] if remote else None
                if entries[row].expected:
                    _count_takeover(reply)
                replies[row] = self._choose(link, entries[row], reply, replies[row])
        return replies

    def _forget(self, entries: Sequence[Entry]) -> None:
        self._incomplete -= {entry.session for entry in entries if entry.closing}

    def _by_link(self, entries: Sequence[Entry]) -> list[tuple[Link, Sequence[int]]]:
        """The links of the entries' sessions (see `Placement.by_link`). It first probes the services that steps may not call."""
        for link in self.links.values():
            if not link.allows_calls:
                link.probe()
        return self._placement.by_link(entries)

    def _submit(self, link: Link, entries: list[Entry]) -> int | None:
        """Sends a step; returns its number for `collect`, None if the service may not or cannot be called."""
        entries = [self._complete(entry) for entry in entries]
        step = link.submit(entries) if link.allows_calls else None
        if step is None:
            self._withhold(link, entries)
        return step

    def _withhold(self, link: Link, entries: Sequence[Entry]) -> None:
        """A service that is not asked is sent only entries that end a session, because it must not keep what the worker has dropped."""
        self._mark_incomplete(entries)
        for entry in entries:
            if entry.closing:
                link.post([entry])

    def _mark_incomplete(self, entries: Sequence[Entry]) -> None:
        """Notes that only the service's next answer shows whether it has their text. What has ended is sent no more."""
        self._incomplete.update(entry.session for entry in entries if not entry.closing)

    def _complete(self, entry: Entry) -> Entry:
        """Gives the last entry of a session the whole text if the service may lack some of it. The service publishes at this entry."""
        if not entry.closing or entry.session not in self._incomplete:
            return entry
        whole = self._texts.told(entry.session, 0)
        if whole is None:
            return entry
        return replace(entry, start=0, tokens=whole.tokens, opening=whole.opening, expected=0)

    def _choose(self, link: Link, entry: Entry, remote: Reply | None, local: Reply) -> Reply:
        if remote is None:
            self._mark_incomplete([entry])
            return _counted_fallback(local)
        if remote.status in (Status.OK, Status.OVER_BUDGET):
            self._incomplete.discard(entry.session)
        if remote.refusal:
            self._report_refused(link, remote.refusal)
        if remote.status is Status.OK and len(remote.trees) == len(entry.queries):
            return remote
        if remote.status is Status.OK:
            return self._with_local_answers(link, remote, local)
        if remote.status is not Status.OVER_BUDGET and not entry.closing:
            self._mark_incomplete([entry])
            self._resend(link, entry.session, remote.known if remote.status is Status.GAP else 0)
        return _counted_fallback(local)

    def _report_refused(self, link: Link, refusal: str) -> None:
        if link.name not in self._have_refused:
            self._have_refused.add(link.name)
            log.warning("datastore %s: refuses an entry, %s; further ones are not told", link.name, refusal)

    def _with_local_answers(self, link: Link, remote: Reply, local: Reply) -> Reply:
        """The reply of a service of an earlier version, which ignores queries, with the local answers to them."""
        if link.name not in self._without_queries:
            self._without_queries.add(link.name)
            log.warning(
                "datastore %s: does not answer queries; they are answered from sessions alone", link.name
            )
        metrics.FALLBACK_DRAFTS.inc(_drafted(local.trees))
        return replace(remote, trees=local.trees)

    def _resend(self, link: Link, session: str, known: int) -> None:
        missing = self._texts.told(session, known)
        if missing is not None:
            metrics.RESYNCS.inc()
            link.post([missing])


def _count_takeover(reply: Reply | None) -> None:
    """Counts whether the service held a session that another instance had begun, at its first step."""
    held = "unanswered" if reply is None else "held" if reply.status is Status.OK else "missing"
    metrics.TAKEOVERS.labels(held).inc()


def _for_local(entry: Entry) -> Entry:
    """The entry for the local engine, which has no text but the sessions' and keeps nothing of one after its end."""
    if entry.opening is None:
        return entry
    return replace(entry, opening=Opening(publish=False, prompt_length=entry.opening.prompt_length))


def _counted_fallback(reply: Reply) -> Reply:
    metrics.FALLBACK_DRAFTS.inc(_drafted((reply.tree, *reply.trees)))
    return reply


def _drafted(trees: Sequence[DraftTree]) -> int:
    return sum(1 for tree in trees if len(tree))
