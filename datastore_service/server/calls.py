"""What is around the work of every call: its span and, if it is refused, its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.refusal import RefusalError

log = logging.getLogger(__name__)

_tracer = trace.get_tracer("specstore")


@contextmanager
def answering(method: str, context: grpc.ServicerContext, metrics: ServiceMetrics) -> Iterator[None]:
    """method: "package.Service/Method". What is logged inside carries the caller's trace id.

    A RefusalError is counted, logged and answered with its status."""
    with _aborting(context), _span(method, context), _reporting(method, context, metrics):
        yield


@contextmanager
def refusing(method: str, context: grpc.ServicerContext, metrics: ServiceMetrics) -> Iterator[None]:
    """The same without a span."""
    with _aborting(context), _reporting(method, context, metrics):
        yield


@contextmanager
def _aborting(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except RefusalError as refusal:
        context.abort(refusal.code, str(refusal))


@contextmanager
def _reporting(method: str, context: grpc.ServicerContext, metrics: ServiceMetrics) -> Iterator[None]:
    try:
        yield
    except RefusalError as refusal:
        metrics.refusals.labels(refusal.code.name).inc()
        reason = {"method": method, "code": refusal.code.name, "reason": str(refusal)}
        if refusal.__cause__ is not None:  # names the file, which is no caller's business
            reason["cause"] = str(refusal.__cause__)
        log.warning("call refused", extra=reason | {"peer": context.peer()})
        raise


@contextmanager
def _span(method: str, context: grpc.ServicerContext) -> Iterator[None]:
    """Below the span that the caller's metadata names. By OpenTelemetry's conventions what the caller got wrong is no error
    of the server's span."""
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
