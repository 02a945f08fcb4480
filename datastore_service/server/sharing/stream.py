"""One namespace's stream: what the others have published is read from it, then what this service has is added."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
from redis import Redis
from redis.exceptions import WatchError

from datastore_service.engine.engine import Engine
from datastore_service.engine.share import NoRoomError
from datastore_service.server.namespaces import HostedNamespace, named
from datastore_service.server.sharing.forgetting import Forgets
from datastore_service.server.sharing.keys import digest_in, keys_of
from datastore_service.server.sharing.lease import Lease
from datastore_service.server.sharing.messages import Document, RefusedError, read_message, text_message
from datastore_service.server.sharing.metrics import ShareMetrics
from datastore_service.server.sharing.places import BATCH, START, last_id, messages_after, order

log = logging.getLogger(__name__)

TOKEN_BYTES = 4
SAMPLES = 5  # messages by which the server estimates what a stream takes
CUT = "cut"  # the field of `Keys.sent` that says up to where the stream was cut; services have 16 digits


@dataclass(frozen=True, slots=True)
class Self:
    """This service, as the streams know it. name: 16 hexadecimal digits. since: it shares its outputs with higher numbers."""

    name: str
    since: int

    @property
    def origin(self) -> int:
        return int(self.name, 16)


class FullError(Exception):
    """The live tier takes no text now: too much waits to be sorted, or the disk takes none. The engine logs and counts which."""


class SharedStream:
    """Reads and writes one stream, for the thread that shares. Every method may raise RedisError.

    positions: by stream, the last message that was read, and whose text is in the live tier. forgets: of this service. save: has the
    positions outlive the process. lease: only who holds it reads and writes here."""

    def __init__(
        self,
        hosted: HostedNamespace,
        service: Self,
        positions: dict[str, str],
        forgets: Forgets,
        save: Callable[[], None],
        metrics: ShareMetrics,
    ) -> None:
        self._hosted, self._keys, self._positions = hosted, keys_of(hosted.namespace), positions
        self._service, self._metrics = service, metrics
        self._forgets, self._save = forgets, save
        self.lease = Lease(self._keys.lease + service.name, service.name)
        self._labels = hosted.namespace.model, hosted.namespace.tenant
        # Number of the newest output that the others were told of. None until an earlier process's is found out.
        self._sent = None if self._keys.texts in positions else service.since
        self._waiting = self._counted = self._sent_since = 0  # at the last `measure`, and since then
        self._logged: set[str] = set()  # reasons of refusals that the log has
        for counter in (metrics.sent, metrics.dropped, metrics.taken, metrics.failures, metrics.missed):
            counter.labels(*self._labels)  # Prometheus sees an increase only of a counter that it knows

    @property
    def _position(self) -> str:
        return self._positions.get(self._keys.texts, START)

    @_position.setter
    def _position(self, number: bytes) -> None:
        self._positions[self._keys.texts] = number.decode()

    @property
    def _engine(self) -> Engine:
        return self._hosted.engine

    def resume(self, client: Redis) -> None:
        """Finds out how things stand on the server, which may have lost what it was told last."""
        client.sadd(self._keys.namespaces, digest_in(self._keys))
        last = last_id(client, self._keys.texts)
        behind = order(last) < order(self._position)
        if behind or self._told(client) < (self._sent or 0):
            self._count_missed("the server has lost messages")
            self._forgets.lost(self._keys.texts)
        if behind:
            self._position = last.encode()
        self._look_for_a_gap(client)
        self.measure()
        self._sent = self._told(client)
        self._counted = self._engine.published.outputs
        self._waiting, self._sent_since = self._engine.waiting(self._sent, self._engine.published.last), 0

    def receive(self, client: Redis) -> bool:
        """Takes what others have published, and forgets what they have forgotten; returns whether there is more. Raises FullError, OSError
        and what storage raises: then the message is read again."""
        if self._told(client) < (self._sent or 0):  # it may have been away without our notice
            self.resume(client)
        messages = messages_after(client, self._keys.texts, self._position)
        for number, fields in messages:
            self._apply(number, fields)
        return len(messages) == BATCH

    def send(self, client: Redis) -> bool:
        """Adds outputs that the others were not told of, once nothing is unread: so a text that follows a forget was published after it.
        Returns whether there is more."""
        assert self._sent is not None  # it was resumed
        texts = list(islice(self._engine.published_here(self._sent), BATCH))
        if not texts:
            return False
        self._engine.sync()  # what a power failure could take from here is not told to others
        if not self._add(client, texts):
            return True
        self._sent = int(texts[-1][1]["number"][0])
        self._sent_since += len(texts)
        self._metrics.sent.labels(*self._labels).inc(len(texts))
        self._cut(client)
        return len(texts) == BATCH

    def measure(self) -> None:
        """Counts what waits, and what has left the live tier unsent."""
        if self._sent is None:
            return
        published = self._engine.published
        waiting = self._engine.waiting(self._sent, published.last)
        expected = self._waiting + published.outputs - self._counted - self._sent_since
        self._metrics.dropped.labels(*self._labels).inc(max(0, expected - waiting))
        self._metrics.unsent.labels(*self._labels).set(waiting)
        self._waiting, self._counted, self._sent_since = waiting, published.outputs, 0

    def _told(self, client: Redis) -> int:
        """Number of the newest output that the server says this service has added."""
        return max(int(client.hget(self._keys.sent, self._service.name) or 0), self._service.since)

    def _look_for_a_gap(self, client: Redis) -> None:
        cut = cast("bytes | None", client.hget(self._keys.sent, CUT))
        if cut and self._position != START and order(self._position) < order(cut.decode()):
            self._count_missed("messages had left the stream before this service read them")

    def _count_missed(self, what: str) -> None:
        self._metrics.missed.labels(*self._labels).inc()
        log.warning(
            "share: %s; repeat here each forget since then", what, extra=named(self._hosted.namespace)
        )

    def _add(self, client: Redis, texts: Sequence[Document]) -> bool:
        """False if there is something unread, or comes meanwhile, or the server has lost what it was told; then nothing was added."""
        last = int(texts[-1][1]["number"][0])
        with client.pipeline() as transaction:
            transaction.watch(self._keys.texts)
            if self._told(transaction) < (self._sent or 0):
                return False
            if messages_after(transaction, self._keys.texts, self._position, 1):
                return False
            transaction.multi()
            for text, provenance in texts:
                transaction.xadd(self._keys.texts, text_message(self._service.origin, text, provenance))
            transaction.hset(self._keys.sent, self._service.name, last)
            try:
                *added, _ = transaction.execute()
            except WatchError:
                return False
        self._position = added[-1]
        return True

    def _cut(self, client: Redis) -> None:
        """Removes the oldest messages beyond the live tier's limits."""
        stream, limits = self._keys.texts, self._engine.limits
        oldest = max(0.0, (time.time() - limits.live_seconds) * 1000)
        removed = client.xtrim(stream, minid=int(oldest)) if oldest else 0
        size, most = client.memory_usage(stream, samples=SAMPLES) or 0, limits.live_tokens * TOKEN_BYTES
        if size > most:
            removed += client.xtrim(stream, maxlen=client.xlen(stream) * most // size)
        if removed and (first := messages_after(client, stream, START, 1)):
            client.hset(self._keys.sent, CUT, first[0][0])

    def _apply(self, number: bytes, fields: Mapping[bytes, bytes]) -> None:
        """Does what a message says, and goes on behind it."""
        forgotten = False
        try:
            said = read_message(fields, self._engine.vocab_size, time.time())
            if not isinstance(said, frozenset):
                self._take(*said)
            elif not self._forgets.is_own(self._keys.texts, number):
                self._engine.forget(said)
                forgotten = True
        except RefusedError as error:
            self._refuse(error.reason, str(error))
        except NoRoomError as error:
            self._refuse("room", str(error))
        self._position = number
        self._forgets.passed(self._keys.texts, number.decode())
        if forgotten:  # read again, it would take what is published from now on
            self._save()

    def _take(self, text: np.ndarray, provenance: np.ndarray) -> None:
        if provenance["origin"][0] == self._service.origin:
            return
        with self._forgets.lock:
            if self._forgets.covers(self._hosted.namespace.tenant, self._keys.texts, provenance):
                return
            taken = self._engine.take(text, provenance)
        if not taken:
            self._engine.settle()
            raise FullError
        self._metrics.taken.labels(*self._labels).inc()

    def _refuse(self, reason: str, words: str) -> None:
        self._metrics.refused.labels(*self._labels, reason).inc()
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning(
                "a message of another service is refused, and no other of this namespace will be told for this reason",
                extra=named(self._hosted.namespace) | {"reason": words},
            )
