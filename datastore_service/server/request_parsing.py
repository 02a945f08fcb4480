"""Parses requests in the call's own thread, so that bytes that are no message are refused like other bad input.

By default gRPC for Python (1.85) parses a request before the call sees it. If that fails in a stream, gRPC ends the
stream, and ends it once more when the call returns. Its core rejects the second end, gRPC waits for it nevertheless, and
a server that waits for the call never stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from datastore_service.server.calls import checked_call
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.refusal import invalid


class RequestParsing(grpc.ServerInterceptor):
    """Methods get messages as usual. Bytes that are no message are answered with INVALID_ARGUMENT."""

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
        parser = _Parser(handler_call_details.method, handler.request_deserializer, self._metrics)
        serializer = handler.response_serializer
        if handler.stream_stream:
            call = parser.stream_stream(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)
        if handler.stream_unary:
            call = parser.stream_unary(handler.stream_unary)
            return grpc.stream_unary_rpc_method_handler(call, response_serializer=serializer)
        if handler.unary_stream:
            call = parser.unary_request(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serializer)
        call = parser.unary_request(handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(call, response_serializer=serializer)


class _Parser:
    """Wraps one method. parse: makes a message from bytes."""

    def __init__(self, method: str, parse: Callable[[bytes], Any], metrics: ServiceMetrics) -> None:
        self._method, self._parse, self._metrics = method.removeprefix("/"), parse, metrics

    def unary_request(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(behavior)  # keeps the attributes by which grpc_health asks for a callback instead of a thread
        def call(data: bytes, context: grpc.ServicerContext, *callback: Any) -> Any:
            with self._checked(context):
                request = self._parse_request(data)
            return behavior(request, context, *callback)

        return call

    def stream_unary(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def call(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._checked(context):
                return behavior(map(self._parse_request, requests), context)

        return call

    def stream_stream(self, behavior: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._checked(context):
                yield from behavior(map(self._parse_request, requests), context)

        return call

    def _checked(self, context: grpc.ServicerContext):
        return checked_call(self._method, context, self._metrics)

    def _parse_request(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError:
            raise invalid(f"request: {len(data)} bytes that are no message of {self._method}") from None
