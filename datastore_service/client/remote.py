"""The datastore of a service, over a gRPC stream."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry import propagate

from datastore_service.client import wire
from datastore_service.client.access import Access, AccessSource, Metadata, open_access
from datastore_service.client.base import Datastore, DatastoreError
from datastore_service.client.channel import open_channel
from datastore_service.client.metrics import DAMAGED_TREES, RECONNECTS
from datastore_service.client.reasons import why_failed
from datastore_service.endpoint import parse_endpoint
from datastore_service.protocol.types import MAX_VOCAB, Entry, Namespace, Reply
from datastore_service.tls import Tls
from proto_gen.specstore.v1 import drafting_pb2 as pb

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64 << 20
MAX_UNANSWERED = 256  # messages; with more the stream is treated as lost
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds between attempts to connect
KEEPALIVE_SECONDS = 20

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    # gRPC 1.85 waits this long for an answer, not grpc.keepalive_timeout_ms.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_SECONDS * 1000),
    # No limit, or the third ping of an idle stream would wait a minute.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", int(FIRST_DELAY * 1000)),
    ("grpc.min_reconnect_backoff_ms", int(FIRST_DELAY * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(LONGEST_DELAY * 1000)),
    # Another client in this process must not share the connection or its back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


_DRAFT = f"/{pb.DESCRIPTOR.services_by_name['Drafting'].full_name}/Draft"


class DeadlineMissedError(DatastoreError):
    """The service has not answered yet."""


class StepState(Enum):
    """State of a submitted step."""

    PENDING = "pending"
    ANSWERED = "answered"  # in time or not
    LOST = "lost"  # its stream has ended


class GrpcDatastore(Datastore):
    """One Draft stream of one namespace, opened and reopened by a background thread.

    The background thread reads replies. The caller's thread only appends to a queue and waits for the reply with its
    step's number; a reply that arrives after its deadline is dropped by that number. While no stream is open, `step`
    raises immediately and `post` drops its entries (a later Reply's status shows what the service lacks).

    endpoint: "HOST:PORT" or "unix:PATH". Raises ValueError naming the field if malformed. vocab_size: a draft tree with an
    id that is not below it is dropped. tenants: whether entries name tenants. No stream is opened to a service that would ignore
    them. access: asked for each stream, so that it shows renewed certificates and tokens. The streams belong to the OpenTelemetry trace in which the object is made, if there
    is one.
    """

    def __init__(
        self,
        endpoint: str,
        namespace: Namespace,
        access: AccessSource = open_access,
        vocab_size: int = MAX_VOCAB,
        tenants: bool = False,
    ) -> None:
        self._vocab_size, self._tenants, self._access = vocab_size, tenants, access
        self._endpoint = parse_endpoint(endpoint)
        self._namespace = wire.namespace_message(namespace)
        self._state = threading.Condition()
        self._outbound: queue.SimpleQueue[pb.DraftRequest | None] | None = None  # None: no stream is open
        # Numbers of the last message sent, answered, awaited by a caller, and sent on a stream that broke.
        self._sent = self._answered = self._awaited = self._lost = 0
        self._lost_reason = ""
        # Replies to awaited steps, in order; None: the stream broke. `collect` skips those that are too late.
        self._arrived: queue.SimpleQueue[pb.DraftReply | None] = queue.SimpleQueue()
        self._wants_rejected, self._reads_columns = True, False  # until a service says otherwise
        self._disconnect_reason = "not connected yet"
        self._closed = False
        self._channel: grpc.Channel | None = None  # once there are files to open it with
        self._tls: Tls | None = None  # of the channel
        self._metadata = _trace_context()
        self._call: Any = None  # of the open stream
        self._reported, self._reported_damage = "", False
        self._thread = threading.Thread(target=self._keep_connected, name="specstore-stream", daemon=True)
        self._thread.start()

    def wait_connected(self, timeout: float) -> bool:
        """Waits until the service has greeted; False if it has not within `timeout` seconds."""
        with self._state:
            return self._state.wait_for(lambda: self._outbound is not None, timeout)

    @property
    def disconnect_reason(self) -> str:
        """Why no stream is open; empty while one is."""
        return self._disconnect_reason

    @property
    def wants_rejected(self) -> bool:
        """What the service said when it last connected."""
        return self._wants_rejected

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        until = time.monotonic() + deadline
        return self.collect(self.submit(entries), entries, until)

    def post(self, entries: Sequence[Entry]) -> None:
        try:
            self.send(entries)
        except DatastoreError as error:
            log.debug("post dropped: %s", error)

    def send(self, entries: Sequence[Entry]) -> None:
        """`post` that raises DatastoreError while no stream is open."""
        self._send(entries, awaited=False)

    def submit(self, entries: Sequence[Entry]) -> int:
        """The sending half of `step`; returns the step's number for `collect`."""
        return self._send(entries, awaited=True)

    def collect(self, step: int, entries: Sequence[Entry], until: float) -> list[Reply]:
        """The waiting half of `step`. entries: those of `submit`. until: a time of time.monotonic()."""
        while True:
            try:
                reply = self._arrived.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise DeadlineMissedError("deadline missed") from None
            if reply is None and step <= self._lost:  # another stream may be open by now
                raise DatastoreError(self._lost_reason)
            if reply is not None and reply.step == step:
                return self._read(reply, entries)

    def state_of(self, step: int) -> StepState:
        """The state of a step of `submit`."""
        with self._state:
            if step <= self._lost:
                return StepState.LOST
            return StepState.ANSWERED if step <= self._answered else StepState.PENDING

    def close(self) -> None:
        with self._state:
            self._closed = True
            self._disconnect("closed")
            call = self._call
            channel = self._channel
        if call is not None:
            call.cancel()
        if channel is not None:
            channel.close()
        self._thread.join(timeout=5)

    def _send(self, entries: Sequence[Entry], awaited: bool) -> int:
        request = wire.request_message(0, entries, self._wants_rejected, self._reads_columns)
        with self._state:
            if self._outbound is None:
                raise DatastoreError(self._disconnect_reason)
            if self._sent - self._answered >= MAX_UNANSWERED:
                self._disconnect(f"{MAX_UNANSWERED} messages unanswered")
                self._call.cancel()  # after its reason is known, which the other thread asks for
                raise DatastoreError(self._disconnect_reason)
            self._sent += 1
            request.step = self._sent
            if awaited:
                self._awaited = self._sent  # before the reply can come
            self._outbound.put(request)
            return self._sent

    def _read(self, reply: pb.DraftReply, entries: Sequence[Entry]) -> list[Reply]:
        try:
            replies, faults = wire.read_replies(reply, entries, self._vocab_size)
        except ValueError as error:
            raise DatastoreError(f"unreadable reply: {error}") from error
        for fault in faults:
            self._note_damaged(fault.name.lower())
        return replies

    def _note_damaged(self, fault: str) -> None:
        DAMAGED_TREES.labels(fault).inc()
        if not self._reported_damage:
            self._reported_damage = True
            log.warning(
                "datastore %s: a draft tree cannot be right (%s): such trees are dropped",
                self._endpoint,
                fault,
            )

    # The background thread.

    def _keep_connected(self) -> None:
        delay = FIRST_DELAY
        while not self._closed:
            try:
                self._run_stream()
                reason = "stream ended by the service"
            except grpc.RpcError as error:
                # Who cancels a stream has said why.
                cancelled = self._call.cancelled()
                reason = self._disconnect_reason if cancelled else why_failed(error)
            except DatastoreError as error:
                reason = str(error)
            with self._state:
                if self._closed:
                    return
                was_open = self._outbound is not None
                self._disconnect(reason)
                self._report(reason, was_open)
                delay = FIRST_DELAY if was_open else min(2 * delay, LONGEST_DELAY)
                self._state.wait_for(lambda: self._closed, delay * random.uniform(0.5, 1.0))

    def _run_stream(self) -> None:
        """One stream, from its greeting to its end."""
        outbound: queue.SimpleQueue[pb.DraftRequest | None] = queue.SimpleQueue()
        outbound.put(pb.DraftRequest(namespace=self._namespace))
        access = self._read_access()
        # Replies are parsed here: a call of which gRPC cannot parse a reply is never ended, and takes one of the service's streams.
        draft = self._channel_of(access.tls).stream_stream(
            _DRAFT, request_serializer=pb.DraftRequest.SerializeToString
        )
        call = draft(_until_none(outbound), metadata=self._metadata + access.metadata)
        with self._state:
            if self._closed:
                call.cancel()
            self._call = call
        try:
            greeting = _parsed(next(call))
            if self._tenants and not greeting.tenants:
                raise DatastoreError(
                    "the service is of an earlier version, which would mix the tenants' texts"
                )
            self._wants_rejected, self._reads_columns = not greeting.without_rejected, greeting.columns
            self._connect(outbound)
            for reply in map(_parsed, call):
                if not self._answered < reply.step <= self._sent:
                    raise DatastoreError(
                        f"a reply to step {reply.step}, of {self._answered + 1} to {self._sent} that wait for one"
                    )
                self._deliver(reply)
        except StopIteration:
            pass
        finally:
            call.cancel()
            outbound.put(None)

    def _read_access(self) -> Access:
        try:
            return self._access()
        except (OSError, ValueError) as error:
            raise DatastoreError(f"cannot show who calls: {error}") from error

    def _channel_of(self, tls: Tls | None) -> grpc.Channel:
        """The channel, another one if the TLS files have changed since it was opened."""
        with self._state:
            if self._closed:
                raise DatastoreError("closed")
            if self._channel is None or tls != self._tls:
                if self._channel is not None:
                    self._channel.close()
                self._channel, self._tls = open_channel(str(self._endpoint), tls, _CHANNEL_OPTIONS), tls
            return self._channel

    def _connect(self, outbound: queue.SimpleQueue[pb.DraftRequest | None]) -> None:
        with self._state:
            self._answered = self._sent
            self._outbound = outbound
            self._disconnect_reason = ""
            self._state.notify_all()
        RECONNECTS.inc()
        log.info("datastore %s: connected", self._endpoint)

    def _disconnect(self, reason: str) -> None:
        if self._outbound is not None:
            self._lost, self._lost_reason = self._sent, reason
            self._arrived.put(None)
        self._outbound = None
        self._disconnect_reason = reason
        self._state.notify_all()

    def _deliver(self, reply: pb.DraftReply) -> None:
        self._answered = reply.step
        if reply.step == self._awaited:
            self._arrived.put(reply)

    def _report(self, reason: str, was_open: bool) -> None:
        """Logs a lost stream and each new reason, not each attempt to connect."""
        if was_open or reason != self._reported:
            log.warning("datastore %s: %s; connecting again in the background", self._endpoint, reason)
        self._reported = reason


def _trace_context() -> Metadata:
    """The current span as call metadata, whose names are lower case."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple((name.lower(), value) for name, value in carrier.items())


def _parsed(reply: bytes) -> pb.DraftReply:
    try:
        return pb.DraftReply.FromString(reply)
    except DecodeError as error:
        raise DatastoreError(f"unreadable reply: {error}") from error


def _until_none(outbound: queue.SimpleQueue[pb.DraftRequest | None]) -> Iterator[pb.DraftRequest]:
    while (request := outbound.get()) is not None:
        yield request
