"""One engine a namespace, made on first use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from datastore_service.engine.engine import Engine
from datastore_service.engine.types import Entry, Namespace, Reply
from datastore_service.server.leases import Leases
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.refusal import exhausted, precondition

log = logging.getLogger(__name__)

NewEngine = Callable[[Namespace], "tuple[Engine, bool]"]


class HostedNamespace:
    """An engine, and which stream holds which of its sessions. prior: whether the prior is attached."""

    def __init__(self, namespace: Namespace, engine: Engine, prior: bool, grace: float) -> None:
        self.namespace, self.engine, self.prior = namespace, engine, prior
        self.leases = Leases(grace)
        self.dropped = False

    def step(self, stream: int, entries: Sequence[Entry]) -> list[Reply]:
        """Raises RefusalError if the namespace was dropped, what the engine raises otherwise."""
        if self.dropped:
            raise precondition(f"namespace: {self.namespace} was dropped; a new stream creates it anew")
        replies = self.engine.step(entries)
        # Whatever the statuses: an opening whose tokens were refused has opened a session all the same, and one message
        # may close a session and open another of its name.
        named = {entry.session for entry in entries}
        opened = {session for session in named if self.engine.has_session(session)}
        self.leases.hold(stream, opened)
        for session in named - opened:
            self.leases.release(session)
        return replies

    def close_expired(self, now: float) -> int:
        """Closes the sessions whose stream broke too long ago; returns how many."""
        expired = self.leases.take_expired(now)
        if expired:
            self.engine.step([Entry(session, closing=True) for session in expired])
        return len(expired)


class Namespaces:
    """The engines of the service. Raises RefusalError when there would be too many or a tokenizer does not fit."""

    def __init__(self, new_engine: NewEngine, limits: ServiceLimits) -> None:
        self._new_engine = new_engine
        self._limits = limits
        self._lock = threading.Lock()
        self._hosted: dict[Namespace, HostedNamespace] = {}

    def __iter__(self):
        return iter(list(self._hosted.values()))

    def find(self, namespace: Namespace) -> HostedNamespace | None:
        return self._hosted.get(namespace)

    def open(self, namespace: Namespace) -> HostedNamespace:
        with self._lock:
            return self._hosted.get(namespace) or self._create(namespace)

    def drop(self, hosted: HostedNamespace) -> None:
        """Forgets a namespace without open sessions. Raises RefusalError for one that has some."""
        opened = len(hosted.engine.sessions())
        if opened:
            raise precondition(f"namespace: {hosted.namespace} has {opened} open sessions; flush them first")
        with self._lock:
            hosted.dropped = True
            if (
                self._hosted.get(hosted.namespace) is hosted
            ):  # else another call dropped it, and a new one is there
                del self._hosted[hosted.namespace]
        log.info(
            "namespace dropped", extra={"model": hosted.namespace.model, "tenant": hosted.namespace.tenant}
        )

    def close_expired(self) -> int:
        return sum(hosted.close_expired(time.monotonic()) for hosted in self)

    def _create(self, namespace: Namespace) -> HostedNamespace:
        self._check_tokenizer(namespace)
        if len(self._hosted) >= self._limits.namespaces:
            raise exhausted(f"namespace: the service already holds {self._limits.namespaces}, its limit")
        engine, prior = self._new_engine(namespace)
        hosted = HostedNamespace(namespace, engine, prior, self._limits.grace)
        self._hosted[namespace] = hosted
        log.info(
            "namespace created", extra={"model": namespace.model, "tenant": namespace.tenant, "prior": prior}
        )
        return hosted

    def _check_tokenizer(self, namespace: Namespace) -> None:
        """One model of one tenant has one tokenizer: another one is a worker set up wrongly."""
        for known in self._hosted:
            if (known.model, known.tenant) == (namespace.model, namespace.tenant):
                raise precondition(
                    f"namespace.tokenizer: {namespace.tokenizer!r}, but model {known.model!r} is served with {known.tokenizer!r}"
                )
