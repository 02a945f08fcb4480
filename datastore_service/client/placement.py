"""Which service has which session."""

from __future__ import annotations

from collections.abc import Sequence

from datastore_service.client import metrics
from datastore_service.client.affinity import affinity_key, ranked
from datastore_service.client.base import Texts
from datastore_service.client.link import Link
from datastore_service.protocol.types import Entry, SessionName


class Placement:
    """Assigns each session to one of the usable services, by affinity. If that one becomes unusable and another one is
    usable, the session moves there with its whole text.

    links: by name, at least one. texts: of the open sessions."""

    def __init__(self, links: dict[str, Link], texts: Texts) -> None:
        self._links, self._texts = links, texts
        self._assigned: dict[SessionName, Link] = {}

    def by_link(self, entries: Sequence[Entry]) -> list[tuple[Link, Sequence[int]]]:
        """The links of the entries' sessions, each with the indices of its entries."""
        if len(self._links) == 1:
            return [(link, range(len(entries))) for link in self._links.values() if entries]
        rows: dict[str, list[int]] = {}
        for row, entry in enumerate(entries):
            rows.setdefault(self._link_of(entry).name, []).append(row)
        return [(self._links[name], of_link) for name, of_link in rows.items()]

    def _link_of(self, entry: Entry) -> Link:
        link = self._assigned.get(entry.session)
        if link is None or not link.usable:
            link = self._assign(entry, link)
        if entry.closing:
            self._assigned.pop(entry.session, None)
        else:
            self._assigned[entry.session] = link
        return link

    def _assign(self, entry: Entry, old: Link | None) -> Link:
        """The first usable service by affinity. If there is none, the old one or the first of all."""
        whole = self._texts.told(entry.session, 0)
        order = ranked(affinity_key(entry, whole.opening if whole else entry.opening), self._links)
        usable = [self._links[name] for name in order if self._links[name].usable]
        if not usable:
            return old or self._links[order[0]]
        if old is not None:
            metrics.MOVES.inc()
            old.post([entry.end_of_session()])  # it may only be slow, and still have the session
            if whole is not None:
                usable[0].post([whole])
        return usable[0]
