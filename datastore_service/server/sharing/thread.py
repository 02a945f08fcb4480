"""The thread that shares: it asks the server about ten times a second, and drafting never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from redis import Redis
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as LateError

from datastore_service.engine.provenance import Subject
from datastore_service.server.namespaces import HostedNamespace, Namespaces, named
from datastore_service.server.sharing.address import ShareAddress
from datastore_service.server.sharing.forgetting import Forgets
from datastore_service.server.sharing.keys import digest_in, keys_of
from datastore_service.server.sharing.metrics import ShareMetrics
from datastore_service.server.sharing.stream import FullError, Self, SharedStream
from datastore_service.storage.errors import StorageError
from datastore_service.storage.share_file import ShareState

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.1
RETRY_SECONDS = 1.0  # between two attempts to reach a server that does not answer
SAVE_SECONDS = 1.0
END_SECONDS = 5.0


class Sharing:
    """Exchanges the outputs of all namespaces with other services, from `start` to `stop`."""

    def __init__(self, address: ShareAddress, namespaces: Namespaces, metrics: ShareMetrics) -> None:
        """Raises StorageError for a damaged file of positions, OSError."""
        self._address, self._namespaces, self._metrics = address, namespaces, metrics
        self._data = namespaces.data
        self._state = self._data.share() if self._data else ShareState()
        self._service = Self(self._state.service, self._state.since)
        self._positions = dict(
            self._state.positions
        )  # the file may lag behind, and must not be ahead of the texts
        self._streams: dict[HostedNamespace, SharedStream] = {}
        self._resumed: set[HostedNamespace] = set()  # since the server answers
        self._client: Redis | None = None
        self._told_lost = False
        self._failing: set[HostedNamespace] = set()  # of which the log has that their exchange fails
        self._untold: set[str] = set()  # tenants of which it has that their forgets are refused
        self._lock = threading.Lock()  # of the state and its file
        self._forgets = Forgets(self._state, self._lock, self._write)
        self._saved = 0.0  # when the positions were saved, of time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specstore-share", daemon=True)
        with self._lock:  # the next process has to know by which name the others know this one
            self._write()

    def start(self) -> None:
        if not (self._address.tls or self._address.endpoint.local):
            log.warning("share: no TLS: texts and the password cross the network readable")
        self._thread.start()

    def stop(self) -> None:
        """Tells the others what they were not told of yet, if the server answers."""
        self._stopping.set()
        self._thread.join(END_SECONDS)

    def forget(self, tenant: str, subjects: Collection[Subject]) -> None:
        """Has the others forget subjects, soon: once this is noted, it outlives the process. Raises OSError."""
        self._forgets.note(tenant, subjects)

    def _run(self) -> None:
        wait = ROUND_SECONDS
        while not self._stopping.wait(wait):
            wait = ROUND_SECONDS if self._round() else RETRY_SECONDS
        self._round()
        self._attempt(self._leave)
        self._save()

    def _round(self) -> bool:
        """One exchange of all that is due. False if the server does not answer."""
        self._attempt(lambda: self._exchange(self._client or self._connected()))
        self._measure()
        return self._client is not None

    def _attempt(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # whatever it is, drafting goes on, and the next round tries again
            self._disconnect(error)

    def _leave(self) -> None:
        if self._client:
            for stream in self._streams.values():
                stream.lease.end(self._client)

    def _connected(self) -> Redis:
        client = self._address.connect()
        self._resumed = set()
        log.info("share: connected", extra={"server": str(self._address.endpoint)})
        self._client, self._told_lost = client, False
        self._metrics.connected.set(1)
        return client

    def _disconnect(self, error: Exception) -> None:
        if not self._told_lost:
            fault = None if isinstance(error, RedisError) else error  # ours
            reason = str(error) or repr(error)
            log.warning("share: this service goes on alone", exc_info=fault, extra={"reason": reason})
        self._client, self._told_lost = None, True
        self._metrics.connected.set(0)

    def _exchange(self, client: Redis) -> None:
        """Namespaces take turns, so that much text of one holds up no other."""
        more = True
        while more:
            self._tell_forgets(client)
            more = any([self._exchange_one(hosted, client) for hosted in self._namespaces])
            if time.monotonic() > self._saved + SAVE_SECONDS:
                self._save()
            more = more and not self._stopping.is_set()

    def _exchange_one(self, hosted: HostedNamespace, client: Redis) -> bool:
        """Whether there is more. What one namespace may not do, or cannot, keeps no other from it."""
        try:
            stream = self._stream(hosted, client)
            more = stream.lease.held(client) and (stream.receive(client) or stream.send(client))
        except (LostError, LateError):
            raise
        except FullError:  # the next round tries again
            return False
        except (RedisError, StorageError, OSError) as error:
            self._count_failure(hosted, error)
            return False
        if hosted in self._failing:
            log.warning("share: works again", extra=named(hosted.namespace))
            self._failing.discard(hosted)
        return more

    def _count_failure(self, hosted: HostedNamespace, error: Exception) -> None:
        self._metrics.failures.labels(hosted.namespace.model, hosted.namespace.tenant).inc()
        if hosted not in self._failing:
            log.error("share: failed", extra=named(hosted.namespace) | {"reason": str(error)})
        self._failing.add(hosted)

    def _stream(self, hosted: HostedNamespace, client: Redis) -> SharedStream:
        """Its stream, which knows how things stand on the server."""
        if hosted not in self._streams:
            self._streams[hosted] = SharedStream(
                hosted, self._service, self._positions, self._forgets, self._save, self._metrics
            )
        if hosted not in self._resumed:
            self._streams[hosted].resume(client)
            self._resumed.add(hosted)
        return self._streams[hosted]

    def _tell_forgets(self, client: Redis) -> None:
        for tenant, due in self._forgets.due().items():
            hosted = [each.namespace for each in self._namespaces if each.namespace.tenant == tenant]
            try:
                self._forgets.tell(client, tenant, due, [digest_in(keys_of(each)) for each in hosted])
            except ResponseError as error:
                self._note_untold(tenant, error)
                continue
            self._untold.discard(tenant)

    def _note_untold(self, tenant: str, error: Exception) -> None:
        """Notes a forget that the server refuses for one tenant. It stays due; other tenants' are told."""
        if tenant not in self._untold:
            extra = {"tenant": tenant, "reason": str(error)}
            log.error("share: the others cannot be told what to forget", extra=extra)
        self._untold.add(tenant)

    def _measure(self) -> None:
        for hosted, stream in list(self._streams.items()):
            stream.measure()
            if hosted.dropped:
                del self._streams[hosted]
        self._metrics.forgets_unsent.set(len(self._state.forgetting))

    def _save(self) -> None:
        """Saves the positions, once the texts before them would survive a power failure. Raises OSError."""
        self._saved = time.monotonic()
        if self._positions != self._state.positions:
            self._namespaces.sync()
            with self._lock:
                self._state.positions = dict(self._positions)
                self._write()

    def _write(self) -> None:
        """Called under the lock."""
        if self._data:
            self._data.keep_share(self._state)
