"""What every gRPC call has around it: a caller with rights, a span, an audit line, and a status and a count if it is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import grpc
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from datastore_service.server.admission import NEEDS, Caller, Context, proof_of
from datastore_service.server.audit import REQUEST_ID, AuditedCall
from datastore_service.server.identities import Identities, Right
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.refusal import RefusalError

_tracer = trace.get_tracer("specstore")


class Call:
    """One call while it is answered. Its messages pass through it.

    caller: who makes it."""

    def __init__(self, caller: Caller, audited: AuditedCall) -> None:
        self.caller, self._audited = caller, audited
        self.tenant_refused = audited.tenant_refused

    def heard(self, message: Any) -> Any:
        """A message of the caller. Raises RefusalError if the caller may not say it."""
        self._audited.asked(message)
        self.caller.admit(message)
        return message

    def said(self, reply: Any) -> Any:
        """A reply to the caller."""
        self._audited.changed(reply)
        return reply


CALL: ContextVar[Call] = ContextVar("call")  # that the current thread or task answers


class Calls:
    """Makes what is around each call. identities: returns those in force."""

    def __init__(self, identities: Callable[[], Identities], metrics: ServiceMetrics) -> None:
        self._identities, self._metrics = identities, metrics

    @contextmanager
    def answered(self, method: str, context: grpc.ServicerContext) -> Iterator[Call]:
        """A call that a thread answers. A RefusalError ends it with its status. method: "package.Service/Method"."""
        try:
            with self._around(method, context) as call:
                yield call
        except RefusalError as refusal:
            context.abort(refusal.code, str(refusal))

    @asynccontextmanager
    async def answered_in_task(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[Call]:
        """A call that is a coroutine."""
        try:
            with self._around(method, context) as call:
                yield call
        except RefusalError as refusal:
            await context.abort(refusal.code, str(refusal))

    @contextmanager
    def _around(self, method: str, context: Context) -> Iterator[Call]:
        """Log lines inside carry the caller's trace id, if it is one of specstore's own calls."""
        audited = AuditedCall(method, context)
        context.set_trailing_metadata(((REQUEST_ID, audited.request_id),))
        with _span(method, context), self._reporting(audited):
            audited.caller = Caller(self._identities, NEEDS[method], proof_of(context))
            call = Call(audited.caller, audited)
            CALL.set(call)
            yield call

    @contextmanager
    def _reporting(self, audited: AuditedCall) -> Iterator[None]:
        code = grpc.StatusCode.CANCELLED  # the caller hung up
        try:
            yield
            code = grpc.StatusCode.OK
        except RefusalError as refusal:
            code = refusal.code
            self._metrics.refusals.labels(code.name).inc()
            audited.refused(refusal)
            raise
        except Exception as error:
            if not isinstance(error, grpc.RpcError):
                code = grpc.StatusCode.UNKNOWN
            raise
        finally:
            audited.ended(code.name)


@contextmanager
def _span(method: str, context: Context) -> Iterator[None]:
    """A child of the span in the caller's metadata. By OpenTelemetry's conventions a caller's mistake is no error of the
    server's span. Calls of health and reflection have none."""
    if not isinstance(NEEDS[method], Right):
        yield
        return
    service, _, name = method.partition("/")
    with _tracer.start_as_current_span(
        method,
        propagate.extract(dict(context.invocation_metadata() or ())),
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
