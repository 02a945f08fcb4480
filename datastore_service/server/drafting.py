"""The Drafting service: one stream for each worker, one message for each decode step."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc

from datastore_service.engine.share import NoRoomError
from datastore_service.protocol.tenants import Step, step_by_tenant
from datastore_service.protocol.types import Reply, Status, step_without_refused
from datastore_service.server import wire
from datastore_service.server.calls import CALL
from datastore_service.server.entry_rights import EntryRights
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.namespaces import HostedNamespace, Namespaces
from datastore_service.server.refusal import RefusalError, exhausted, invalid, precondition
from datastore_service.server.tenant_use import TenantUse
from proto_gen.specstore.v1 import drafting_pb2 as pb
from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingServicer

log = logging.getLogger(__name__)

GREETING_SECONDS = 10.0


class Drafting(DraftingServicer):
    """A message takes one thread while it is answered. The number of streams is limited."""

    def __init__(self, namespaces: Namespaces, limits: ServiceLimits, metrics: ServiceMetrics) -> None:
        self._namespaces, self._limits, self._metrics = namespaces, limits, metrics
        self._threads = ThreadPoolExecutor(limits.streams, "specstore-draft")
        self._numbers = itertools.count(1)
        self._in_flight = _InFlight()
        self._draining = False
        self.streams = 0
        metrics.count_streams(lambda: self.streams)

    async def Draft(  # noqa: N802
        self, requests: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext
    ) -> None:
        if self.streams >= self._limits.streams:
            raise exhausted(f"Draft: the service already has {self._limits.streams} streams, its limit")
        self.streams += 1
        stream = _Stream(next(self._numbers), self._namespaces, self._limits, self._metrics)
        try:
            await self._answer_all(stream, requests, context)
        finally:  # in a thread: it may wait for an answer in progress
            ending = asyncio.get_running_loop().run_in_executor(self._threads, stream.end)
            ending.add_done_callback(self._count_ended)

    async def _answer_all(
        self, stream: _Stream, requests: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext
    ) -> None:
        loop = asyncio.get_running_loop()
        in_trace = contextvars.copy_context().run  # log lines carry the call's trace
        async for request in _greeted(requests):
            if wait := stream.turn():
                await asyncio.sleep(wait)
            reply = await loop.run_in_executor(self._threads, in_trace, self._answer, stream, request)
            await context.write(reply)
            if self._draining:
                raise RefusalError(grpc.StatusCode.UNAVAILABLE, "the service is shutting down")

    def _count_ended(self, _: asyncio.Future) -> None:
        self.streams -= 1

    def _answer(self, stream: _Stream, request: pb.DraftRequest) -> pb.DraftReply:
        with self._in_flight:
            started = time.perf_counter()
            reply = stream.answer(request)
            self._metrics.step_seconds.observe(time.perf_counter() - started)
            return reply

    def drain(self, timeout: float) -> bool:
        """Waits until every message has been answered, and ends each stream after its next reply; False on timeout."""
        self._draining = True
        return self._in_flight.wait_for_none(timeout)


async def _greeted(requests: AsyncIterator[pb.DraftRequest]) -> AsyncIterator[pb.DraftRequest]:
    """The messages. Raises RefusalError if the first takes too long: a worker sends one immediately."""
    try:
        yield await asyncio.wait_for(anext(requests), GREETING_SECONDS)
    except StopAsyncIteration:
        return
    except TimeoutError:
        raise RefusalError(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"Draft: no message within {GREETING_SECONDS:g} s"
        ) from None
    async for request in requests:
        yield request


class _InFlight:
    """Counts the messages that are being answered. Each is answered inside the context."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait_for_none(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout)


class _Stream:
    """Answers the messages of one stream. number: identifies the stream in the leases."""

    def __init__(
        self, number: int, namespaces: Namespaces, limits: ServiceLimits, metrics: ServiceMetrics
    ) -> None:
        self._number, self._namespaces, self._limits, self._metrics = number, namespaces, limits, metrics
        self._rights = EntryRights(CALL.get())
        self._hosted: HostedNamespace | None = None
        self._of_tenants: dict[str, HostedNamespace] = {}  # that entries have named
        self._told: set[str] = set()  # kinds of refusals that the log has
        self._counted: TenantUse | None = None  # has this stream among the tenant's
        self._ended = False
        self._lock = threading.Lock()  # a stream that breaks ends when its last message is answered

    def turn(self) -> float:
        """Seconds that the next message has to wait, by the quota of the stream's tenant. The first names the tenant and waits for none."""
        return 0.0 if self._counted is None else self._counted.turn()

    def answer(self, request: pb.DraftRequest) -> pb.DraftReply:
        with self._lock:
            return self._answer(request)

    def _answer(self, request: pb.DraftRequest) -> pb.DraftReply:
        hosted = self._namespace(request)
        read = wire.read_entries(request, hosted.engine.vocab_size, self._limits)
        entries = self._rights.permitted(read, hosted.namespace.tenant)
        started = time.perf_counter()
        try:
            replies = step_without_refused(entries, lambda kept: step_by_tenant(kept, self._step_of))
        except ValueError as error:
            raise invalid(f"entries: {error}") from error
        self._metrics.engine_seconds.observe(time.perf_counter() - started)
        self._count_over_budget(hosted, replies)
        self._report_refused(replies)
        message = wire.reply_message(request.step, replies, packed=request.HasField("columns"))
        if request.HasField("namespace"):
            message.without_rejected = hosted.engine.limits.refusals == 0
            message.tenants = message.columns = True
        return message

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._counted is not None:
                self._counted.end_stream()
            for hosted in (self._hosted, *self._of_tenants.values()):
                if hosted is not None:
                    hosted.leases.stream_broke(self._number, time.monotonic())

    def _count(self, tenant: str) -> None:
        """Counts the stream among the tenant's, once. Raises RefusalError if that would exceed the tenant's quota."""
        if self._ended or self._counted is not None:
            return
        use = self._namespaces.quotas.of(tenant)
        try:
            use.begin_stream()
        except NoRoomError as error:
            raise exhausted(str(error)) from error
        self._counted = use

    def _count_over_budget(self, hosted: HostedNamespace, replies: list[Reply]) -> None:
        """Also 0 of them: Prometheus sees an increase only of a counter that it knows."""
        refused = sum(reply.status is Status.OVER_BUDGET for reply in replies)
        self._metrics.over_budget.labels(hosted.namespace.model).inc(refused)

    def _report_refused(self, replies: list[Reply]) -> None:
        refusal = next((reply.refusal for reply in replies if reply.refusal), "")
        if refusal and self._is_first("entry"):
            log.warning("entry refused, and no other of this stream will be told", extra={"reason": refusal})

    def _is_first(self, kind: str) -> bool:
        """Whether the log has none of the kind from this stream. Clients choose names: only kinds are few."""
        first = kind not in self._told
        self._told.add(kind)
        return first

    def _step_of(self, tenant: str) -> Step | None:
        hosted = self._hosted if not tenant else self._of_tenant(tenant)
        return None if hosted is None else functools.partial(hosted.step, self._number)

    def _of_tenant(self, tenant: str) -> HostedNamespace | None:
        """Looked up in every message: a namespace that was dropped is made anew, for this stream too."""
        assert self._hosted is not None
        namespace = replace(self._hosted.namespace, tenant=tenant)
        try:
            self._of_tenants[tenant] = self._namespaces.open(namespace)
        except RefusalError as refusal:  # other tenants' entries are served
            if self._is_first(f"tenant {refusal.code.name}"):
                log.warning(
                    "tenant refused, and no other of this stream will be told for this code",
                    extra={"tenant": tenant, "code": refusal.code.name, "reason": str(refusal)},
                )
            return None
        return self._of_tenants[tenant]

    def _namespace(self, request: pb.DraftRequest) -> HostedNamespace:
        if not request.HasField("namespace"):
            if self._hosted is None:
                raise precondition("namespace: required in the first message of a stream")
            return self._hosted
        namespace = wire.read_namespace(request.namespace, self._limits)
        if self._hosted is None:
            self._count(namespace.tenant)
            find = self._namespaces.existing if request.existing else self._namespaces.open
            self._hosted = find(namespace)
        elif namespace != self._hosted.namespace:
            raise precondition(
                f"namespace: changed within the stream, from {self._hosted.namespace} to {namespace}"
            )
        return self._hosted
