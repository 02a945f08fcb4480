"""Requests are read in the call's own thread, so that bytes that are no message are refused like other bad input.

Left to itself gRPC for Python (1.85) reads them before the call sees them. Where that fails it ends a stream, and ends it
once more when the call returns; its core turns the second end down, gRPC waits for it all the same, and a server that
waits for a call never stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from datastore_service.server.calls import refusing
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.refusal import invalid


class Reading(grpc.ServerInterceptor):
    """Methods get messages as ever; what is no message is answered INVALID_ARGUMENT."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        reader = _Reader(handler_call_details.method, handler.request_deserializer, self._metrics)
        serializer = handler.response_serializer
        if handler.stream_stream:
            call = reader.replies_to_many(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)
        if handler.stream_unary:
            call = reader.reply_to_many(handler.stream_unary)
            return grpc.stream_unary_rpc_method_handler(call, response_serializer=serializer)
        if handler.unary_stream:
            call = reader.answer_to_one(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serializer)
        call = reader.answer_to_one(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(call, response_serializer=serializer)


class _Reader:
    """Wraps one method. parse: makes a message of bytes."""

    def __init__(self, method: str, parse: Callable[[bytes], Any], metrics: ServiceMetrics) -> None:
        self._method, self._parse, self._metrics = method.removeprefix("/"), parse, metrics

    def answer_to_one(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(behavior)  # with the attributes by which grpc_health asks for a callback instead of a thread
        def call(data: bytes, context: grpc.ServicerContext, *callback: Any) -> Any:
            with self._refusing(context):
                request = self._read(data)
            return behavior(request, context, *callback)

        return call

    def reply_to_many(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def call(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._refusing(context):
                return behavior(map(self._read, requests), context)

        return call

    def replies_to_many(self, behavior: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._refusing(context):
                yield from behavior(map(self._read, requests), context)

        return call

    def _refusing(self, context: grpc.ServicerContext):
        return refusing(self._method, context, self._metrics)

    def _read(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError:
            raise invalid(f"request: {len(data)} bytes that are no message of {self._method}") from None
