"""One engine a namespace, made on first use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from datastore_service.engine.engine import Engine
from datastore_service.engine.live_store import LiveStore
from datastore_service.engine.segment import Segment, damaged
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Entry, Namespace, Reply
from datastore_service.server.leases import Leases
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.refusal import disk_refused, exhausted, invalid, precondition, storage_refused
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.errors import StorageError

log = logging.getLogger(__name__)

NewEngine = Callable[[Namespace, "LiveStore | None"], "tuple[Engine, bool]"]


class HostedNamespace:
    """An engine, and which streams hold which of its sessions. prior: whether the prior is attached. stored: whether
    the live tier outlives the process."""

    def __init__(self, namespace: Namespace, engine: Engine, prior: bool, stored: bool, grace: float) -> None:
        self.namespace, self.engine, self.prior, self.stored = namespace, engine, prior, stored
        self.leases = Leases(grace)
        self.dropped = False

    def step(self, stream: int, entries: Sequence[Entry]) -> list[Reply]:
        """Raises RefusalError if the namespace was dropped, what the engine raises otherwise."""
        self.check_kept()
        replies = self.engine.step(entries)
        # Whatever the statuses: an opening whose tokens were refused has opened a session all the same, and one message
        # may close a session and open another of its name.
        named = {entry.session for entry in entries}
        handed_over = {entry.session for entry in entries if entry.opening and entry.opening.handing_over}
        self.leases.name(stream, named, self.engine.has_session, handed_over, time.monotonic())
        return replies

    def check_kept(self) -> None:
        """Raises RefusalError if the namespace was dropped while a call held it."""
        if self.dropped:
            raise precondition(f"namespace: {self.namespace} was dropped; a new stream creates it anew")

    def close_expired(self, now: float) -> int:
        """Closes the sessions whose stream broke too long ago; returns how many."""
        expired = self.leases.take_expired(now)
        if expired:
            self.engine.step([Entry(session, closing=True) for session in expired])
        return len(expired)


class Namespaces:
    """The engines of the service. Raises RefusalError when there would be too many or a tokenizer does not fit.

    data: keeps their live tiers, None for in memory alone. What it has is hosted at once; raises StorageError for what
    cannot be read."""

    def __init__(
        self, new_engine: NewEngine, limits: ServiceLimits, data: DataDirectory | None = None
    ) -> None:
        self._new_engine = new_engine
        self._limits = limits
        self.data = data
        self._lock = threading.Lock()
        self._hosted: dict[Namespace, HostedNamespace] = {}
        self._damaged: set[Segment] = set()
        for namespace in data.namespaces if data else ():
            tokens = self._host(namespace).engine.stats().tiers[Tier.LIVE].tokens
            log.info(
                "namespace restored",
                extra={"model": namespace.model, "tenant": namespace.tenant, "live_tokens": tokens},
            )

    def __iter__(self):
        return iter(list(self._hosted.values()))

    def find(self, namespace: Namespace) -> HostedNamespace | None:
        return self._hosted.get(namespace)

    def open(self, namespace: Namespace) -> HostedNamespace:
        with self._lock:
            return self._hosted.get(namespace) or self._create(namespace)

    def drop(self, hosted: HostedNamespace) -> None:
        """Forgets a namespace without open sessions, its stored text too. Raises RefusalError for one that has some,
        OSError if the disk refuses: then it takes no more text, and can be dropped again."""
        opened = len(hosted.engine.sessions())
        if opened:
            raise precondition(f"namespace: {hosted.namespace} has {opened} open sessions; flush them first")
        hosted.dropped = True
        hosted.engine.close()  # waits for a merge
        with self._lock:
            if self._hosted.get(hosted.namespace) is hosted:  # else another call has dropped it
                if self.data:
                    self.data.remove(hosted.namespace)
                del self._hosted[hosted.namespace]
        log.info(
            "namespace dropped", extra={"model": hosted.namespace.model, "tenant": hosted.namespace.tenant}
        )

    def close_expired(self) -> int:
        return sum(hosted.close_expired(time.monotonic()) for hosted in self)

    def sync(self) -> None:
        """Makes what sessions have published survive a power failure."""
        for hosted in self:
            hosted.engine.sync()

    def check_segments(self) -> None:
        """Compares all that is drafted from with its checksums, and takes out what has changed. Reads all of it."""
        self._damaged |= damaged({segment for hosted in self for segment in hosted.engine.segments()})
        for hosted in self:
            hosted.engine.take_out(self._damaged)

    def close(self) -> None:
        """Syncs, and lets go of the data directory. Nothing may be published meanwhile or afterwards."""
        for hosted in self:
            hosted.engine.close()
        if self.data:
            self.data.close()

    def _create(self, namespace: Namespace) -> HostedNamespace:
        self._check_tokenizer(namespace)
        if len(self._hosted) >= self._limits.namespaces:
            raise exhausted(f"namespace: the service already holds {self._limits.namespaces}, its limit")
        try:
            hosted = self._host(namespace)
        except ValueError as error:
            raise invalid(str(error)) from error
        except StorageError as error:
            raise storage_refused(error) from error
        except OSError as error:
            raise disk_refused(error) from error
        log.info(
            "namespace created",
            extra={"model": namespace.model, "tenant": namespace.tenant, "prior": hosted.prior},
        )
        return hosted

    def _host(self, namespace: Namespace) -> HostedNamespace:
        store = self.data.open(namespace) if self.data else None
        engine, prior = self._new_engine(namespace, store)
        engine.take_out(self._damaged)  # of the prior, which namespaces share
        hosted = HostedNamespace(namespace, engine, prior, store is not None, self._limits.grace)
        self._hosted[namespace] = hosted
        return hosted

    def _check_tokenizer(self, namespace: Namespace) -> None:
        """One model of one tenant has one tokenizer: another one is a worker set up wrongly."""
        for known in self._hosted:
            if (known.model, known.tenant) == (namespace.model, namespace.tenant):
                raise precondition(
                    f"namespace.tokenizer: {namespace.tokenizer!r}, but model {known.model!r} is served with {known.tokenizer!r}"
                )
