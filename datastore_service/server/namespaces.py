"""The namespaces that the service hosts: an engine for each, made at its first use."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from datastore_service.engine.engine import Engine
from datastore_service.engine.live.store import LiveStore
from datastore_service.engine.segment import Segment, damaged
from datastore_service.engine.share import Share
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Entry, Namespace, Reply
from datastore_service.server.leases import Leases
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.quotas import Quotas
from datastore_service.server.refusal import (
    disk_refused,
    exhausted,
    invalid,
    not_found,
    precondition,
    storage_refused,
)
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.storage.errors import StorageError
from datastore_service.storage.segment_file import shortened

log = logging.getLogger(__name__)

LISTED = 3  # namespaces that a refusal names, each of up to 512 bytes

EngineFactory = Callable[[Namespace, "LiveStore | None", Share], "tuple[Engine, bool]"]


def named(namespace: Namespace) -> dict[str, str]:
    """The namespace, in a line of the log. The tokenizer follows from the others."""
    return {"model": namespace.model, "tenant": namespace.tenant}


class HostedNamespace:
    """An engine and the leases of its sessions. prior: whether the prior is attached. stored: whether the live tier
    outlives the process."""

    def __init__(self, namespace: Namespace, engine: Engine, prior: bool, stored: bool, grace: float) -> None:
        self.namespace, self.engine, self.prior, self.stored = namespace, engine, prior, stored
        self.leases = Leases(grace)
        self.dropped = False

    def step(self, stream: int, entries: Sequence[Entry]) -> list[Reply]:
        """Raises RefusalError if the namespace was dropped, and what the engine raises."""
        self.check_not_dropped()
        replies = self.engine.step(entries)
        # Whatever the statuses: an opening whose tokens were refused has opened a session all the same, and one message
        # may close a session and open another of its name.
        named = {entry.session for entry in entries}
        handed_over = {entry.session for entry in entries if entry.opening and entry.opening.handing_over}
        self.leases.name(stream, named, self.engine.open_of, handed_over, time.monotonic())
        return replies

    def check_not_dropped(self) -> None:
        """Raises RefusalError if the namespace was dropped while a call held it."""
        if self.dropped:
            raise precondition(f"namespace: {self.namespace} was dropped; a new stream creates it anew")

    def release(self) -> None:
        """Lets all texts of a dropped namespace go. A stream that has named it holds this object until its end."""
        self.engine.flush()
        self.engine.set_prior(())

    def close_expired(self, now: float) -> int:
        """Closes the sessions that no stream has claimed in time; returns how many."""
        expired = self.leases.take_expired(now)
        if expired:
            self.engine.step([Entry(session, closing=True) for session in expired])
        return len(expired)


class Namespaces:
    """Raises RefusalError for one namespace too many and for a tokenizer that does not fit.

    data: keeps the live tiers and the quotas; None keeps them in memory alone. The namespaces in it are hosted from the start; raises
    StorageError for what cannot be read."""

    def __init__(
        self, new_engine: EngineFactory, limits: ServiceLimits, data: DataDirectory | None = None
    ) -> None:
        self._new_engine = new_engine
        self._limits = limits
        self.data = data
        self.quotas = Quotas(limits.quotas, data)
        self._lock = threading.Lock()
        self._hosted: dict[Namespace, HostedNamespace] = {}
        self._damaged: set[Segment] = set()
        for namespace in data.namespaces if data else ():
            tokens = self._host(namespace).engine.stats().tiers[Tier.LIVE].tokens
            log.info("namespace restored", extra=named(namespace) | {"live_tokens": tokens})

    def __iter__(self):
        return iter(list(self._hosted.values()))

    def find(self, namespace: Namespace) -> HostedNamespace | None:
        return self._hosted.get(namespace)

    def open(self, namespace: Namespace) -> HostedNamespace:
        with self._lock:
            return self._hosted.get(namespace) or self._create(namespace)

    def existing(self, namespace: Namespace) -> HostedNamespace:
        """Raises RefusalError with the tenant's namespaces if this is none of them."""
        hosted = self.find(namespace)
        if hosted is None:
            known = [each.namespace for each in self if each.namespace.tenant == namespace.tenant]
            names = [f"model {each.model!r} with tokenizer {each.tokenizer!r}" for each in known]
            more = [f"{len(names) - LISTED} more"] if len(names) > LISTED else []
            raise not_found(
                f"namespace: there is no model {namespace.model!r} with tokenizer {namespace.tokenizer!r}; "
                f"tenant {namespace.tenant!r} has {', '.join(names[:LISTED] + more) or 'none'}"
            )
        return hosted

    def of_tenant(self, tenant: str) -> tuple[list[HostedNamespace], list[StorageError]]:
        """A tenant's namespaces, and the faults of snapshots that may be the tenant's. A namespace that was dropped and has snapshots is
        opened. Raises RefusalError if there is none, and StorageError where one of the faults may be of it."""
        hosted = {each.namespace for each in self}
        known, faults = self.data.snapshot_namespaces(hosted) if self.data else (hosted, [])
        chosen = [name for name in known if name.tenant == tenant]
        if not chosen:
            raise faults[0] if faults else not_found(f"namespace: tenant {tenant!r} has none")
        return [self.open(name) for name in chosen], faults

    def drop(self, hosted: HostedNamespace) -> None:
        """Forgets a namespace and its stored text. Raises RefusalError if it has open sessions, OSError if the disk refuses:
        then it takes no more text, and can be dropped again."""
        opened = len(hosted.engine.sessions())
        if opened:
            raise precondition(f"namespace: {hosted.namespace} has {opened} open sessions; flush them first")
        hosted.dropped = True
        hosted.engine.close()  # waits for a merge
        with self._lock:
            if self._hosted.get(hosted.namespace) is hosted:  # otherwise another call has dropped it
                if self.data:
                    self.data.remove(hosted.namespace)
                del self._hosted[hosted.namespace]
        hosted.release()

    def expire(self, snapshot_seconds: float) -> None:
        """Has texts leave that have their greatest age. snapshot_seconds: that of a snapshot. Raises OSError."""
        for hosted in self:
            hosted.engine.expire()
        if self.data and snapshot_seconds < math.inf:
            self.data.remove_old_snapshots(time.time() - snapshot_seconds)

    def close_expired(self) -> int:
        return sum(hosted.close_expired(time.monotonic()) for hosted in self)

    def sync(self) -> None:
        """Makes what sessions have published survive a power failure."""
        for hosted in self:
            hosted.engine.sync()

    def check_lengths(self) -> None:
        """Takes out the segments whose files were shortened, before somebody reads what they lack. Takes microseconds."""
        cut = set(filter(shortened, self._segments()))
        for segment in cut:
            assert segment.origin is not None
            log.error("segment taken out: %s: length: the file was shortened", segment.origin.path)
        self._take_out(cut)

    def check_segments(self) -> None:
        """Reads every segment, compares it with its checksums, and takes out those that have changed."""
        self.check_lengths()
        self._take_out(damaged(self._segments()))

    def _segments(self) -> set[Segment]:
        return {segment for hosted in self for segment in hosted.engine.segments()}

    def _take_out(self, segments: set[Segment]) -> None:
        if segments:
            self._damaged |= segments
            for hosted in self:
                hosted.engine.take_out(segments)

    def close(self) -> None:
        """Syncs and releases the data directory. Nothing may be published meanwhile or afterwards."""
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
        log.info("namespace created", extra=named(namespace) | {"prior": hosted.prior})
        return hosted

    def _host(self, namespace: Namespace) -> HostedNamespace:
        store = self.data.open(namespace) if self.data else None
        use = self.quotas.of(namespace.tenant)
        engine, prior = self._new_engine(namespace, store, use)
        use.count_text_of(engine)
        engine.take_out(self._damaged)  # also the prior's: namespaces share it
        hosted = HostedNamespace(namespace, engine, prior, store is not None, self._limits.grace)
        self._hosted[namespace] = hosted
        return hosted

    def _check_tokenizer(self, namespace: Namespace) -> None:
        """A tenant's model has one tokenizer: another one comes from a worker that is configured wrongly."""
        for known in self._hosted:
            if (known.model, known.tenant) == (namespace.model, namespace.tenant):
                raise precondition(
                    f"namespace.tokenizer: {namespace.tokenizer!r}, but model {known.model!r} is served with {known.tokenizer!r}"
                )
