"""What every gRPC call has around it: a span, and a status, a log line and a count if it is refused."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeAlias

import grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.refusal import RefusalError

log = logging.getLogger(__name__)

_Context: TypeAlias = grpc.ServicerContext | grpc.aio.ServicerContext
_tracer = trace.get_tracer("specstore")


@contextmanager
def traced_call(method: str, context: grpc.ServicerContext, metrics: ServiceMetrics) -> Iterator[None]:
    """A `checked_call` inside a span. Log lines inside carry the caller's trace id."""
    with _aborting(context), _span(method, context), _reporting(method, context, metrics):
        yield


@contextmanager
def checked_call(method: str, context: grpc.ServicerContext, metrics: ServiceMetrics) -> Iterator[None]:
    """Counts and logs a RefusalError, and ends the call with its status. method: "package.Service/Method"."""
    with _aborting(context), _reporting(method, context, metrics):
        yield


@asynccontextmanager
async def traced_coroutine(
    method: str, context: grpc.aio.ServicerContext, metrics: ServiceMetrics
) -> AsyncIterator[None]:
    """`traced_call` of a call that is a coroutine."""
    async with _coroutine_aborting(context):
        with _span(method, context), _reporting(method, context, metrics):
            yield


@asynccontextmanager
async def checked_coroutine(
    method: str, context: grpc.aio.ServicerContext, metrics: ServiceMetrics
) -> AsyncIterator[None]:
    """`checked_call` of a call that is a coroutine."""
    async with _coroutine_aborting(context):
        with _reporting(method, context, metrics):
            yield


@contextmanager
def _aborting(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except RefusalError as refusal:
        context.abort(refusal.code, str(refusal))


@asynccontextmanager
async def _coroutine_aborting(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    try:
        yield
    except RefusalError as refusal:
        await context.abort(refusal.code, str(refusal))


@contextmanager
def _reporting(method: str, context: _Context, metrics: ServiceMetrics) -> Iterator[None]:
    try:
        yield
    except RefusalError as refusal:
        metrics.refusals.labels(refusal.code.name).inc()
        reason = {"method": method, "code": refusal.code.name, "reason": str(refusal)}
        if refusal.__cause__ is not None:  # it names a file, which the caller must not see
            reason["cause"] = str(refusal.__cause__)
        log.warning("call refused", extra=reason | {"peer": context.peer()})
        raise


@contextmanager
def _span(method: str, context: _Context) -> Iterator[None]:
    """A child of the span in the caller's metadata. By OpenTelemetry's conventions a caller's mistake is no error of the
    server's span."""
    service, _, name = method.partition("/")
    with _tracer.start_as_current_span(
        method,
        propagate.extract(dict(context.invocation_metadata())),
        SpanKind.SERVER,
        {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        code = grpc.StatusCode.CANCELLED
        try:
            yield
            code = grpc.StatusCode.OK
        except RefusalError as refusal:
            code = refusal.code
            raise
        except grpc.RpcError:  # the caller hung up
            raise
        except Exception as error:
            code = grpc.StatusCode.UNKNOWN
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            span.set_attribute("rpc.grpc.status_code", code.value[0])
