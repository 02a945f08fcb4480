"""The Drafting service: one stream a worker, one message a decode step."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import grpc

from datastore_service.server import wire
from datastore_service.server.calls import answering
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.namespaces import HostedNamespace, Namespaces
from datastore_service.server.refusal import RefusalError, exhausted, invalid, precondition
from proto_gen.specstore.v1 import drafting_pb2 as pb
from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingServicer

DRAFTING = pb.DESCRIPTOR.services_by_name["Drafting"].full_name
GREETING_SECONDS = 10.0


class Drafting(DraftingServicer):
    """A stream takes one thread of the server's pool, hence the bound on streams."""

    def __init__(self, namespaces: Namespaces, limits: ServiceLimits, metrics: ServiceMetrics) -> None:
        self._namespaces, self._limits, self._metrics = namespaces, limits, metrics
        self._numbers = itertools.count(1)
        self._state = threading.Condition()
        self._in_flight = 0
        self._draining = False
        self.streams = 0
        self._silent: dict[grpc.ServicerContext, float] = {}  # streams without a message yet, and since when
        metrics.count_streams(lambda: self.streams)

    def Draft(self, request_iterator: Iterator[pb.DraftRequest], context: grpc.ServicerContext):  # noqa: N802
        with answering(f"{DRAFTING}/Draft", context, self._metrics):
            self._admit(context)
            yield from self._replies(request_iterator, context)

    def _replies(
        self, requests: Iterator[pb.DraftRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.DraftReply]:
        stream = _Stream(next(self._numbers), self._namespaces, self._limits, self._metrics)
        try:
            for request in requests:
                self._silent.pop(context, None)
                with self._flight():
                    started = time.perf_counter()
                    reply = stream.answer(request)
                    self._metrics.step_seconds.observe(time.perf_counter() - started)
                yield reply
                if self._draining:
                    raise RefusalError(grpc.StatusCode.UNAVAILABLE, "the service is shutting down")
        finally:
            stream.end()
            with self._state:
                self._silent.pop(context, None)
                self.streams -= 1

    def end_silent(self, now: float) -> int:
        """Cancels the streams whose caller has said nothing for too long: a worker greets at once. Returns how many."""
        late = [context for context, since in list(self._silent.items()) if now - since > GREETING_SECONDS]
        for context in late:
            context.cancel()
        return len(late)

    def drain(self, timeout: float) -> bool:
        """Waits until no message is being answered and ends each stream after its next reply; False on timeout."""
        self._draining = True
        with self._state:
            return self._state.wait_for(lambda: self._in_flight == 0, timeout)

    def _admit(self, context: grpc.ServicerContext) -> None:
        with self._state:
            if self.streams >= self._limits.streams:
                raise exhausted(f"Draft: the service already has {self._limits.streams} streams, its limit")
            self.streams += 1
            self._silent[context] = time.monotonic()

    def _flight(self) -> _Flight:
        return _Flight(self)


class _Flight:
    """Counts a message that is being answered."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting

    def __enter__(self) -> None:
        with self._drafting._state:
            self._drafting._in_flight += 1

    def __exit__(self, *_: object) -> None:
        with self._drafting._state:
            self._drafting._in_flight -= 1
            self._drafting._state.notify_all()


class _Stream:
    def __init__(
        self, number: int, namespaces: Namespaces, limits: ServiceLimits, metrics: ServiceMetrics
    ) -> None:
        self._number, self._namespaces, self._limits, self._metrics = number, namespaces, limits, metrics
        self._hosted: HostedNamespace | None = None

    def answer(self, request: pb.DraftRequest) -> pb.DraftReply:
        hosted = self._namespace(request)
        entries = wire.read_entries(request, hosted.engine.vocab_size, self._limits)
        started = time.perf_counter()
        try:
            replies = hosted.step(self._number, entries)
        except ValueError as error:
            raise invalid(f"entries: {error}") from error
        self._metrics.engine_seconds.observe(time.perf_counter() - started)
        message = wire.reply_message(request.step, replies)
        if request.HasField("namespace"):
            message.without_rejected = hosted.engine.limits.refusals == 0
        return message

    def end(self) -> None:
        if self._hosted is not None:
            self._hosted.leases.stream_broke(self._number, time.monotonic())

    def _namespace(self, request: pb.DraftRequest) -> HostedNamespace:
        if not request.HasField("namespace"):
            if self._hosted is None:
                raise precondition("namespace: required in the first message of a stream")
            return self._hosted
        namespace = wire.read_namespace(request.namespace, self._limits)
        if self._hosted is None:
            self._hosted = self._namespaces.open(namespace)
        elif namespace != self._hosted.namespace:
            raise precondition(
                f"namespace: changed within the stream, from {self._hosted.namespace} to {namespace}"
            )
        return self._hosted
