"""Parses requests in the call itself, so that bytes that are no message are refused like other bad input.

By default gRPC for Python (1.85) parses a request before the call sees it, and answers such bytes with a status of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from datastore_service.server.calls import checked_call, checked_coroutine
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.refusal import invalid


class RequestParsing(grpc.aio.ServerInterceptor):
    """Methods get messages as usual. Bytes that are no message are answered with INVALID_ARGUMENT."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        parser = _Parser(handler_call_details.method, handler.request_deserializer, self._metrics)
        serializer = handler.response_serializer
        if handler.stream_stream:
            call = parser.parsing(handler.stream_stream, parser.each)
            return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)
        if handler.stream_unary:
            call = parser.parsing(handler.stream_unary, parser.each)
            return grpc.stream_unary_rpc_method_handler(call, response_serializer=serializer)
        if handler.unary_stream:
            call = parser.parsing(handler.unary_stream, parser.one)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serializer)
        call = parser.parsing(handler.unary_unary, parser.one)
        return grpc.unary_unary_rpc_method_handler(call, response_serializer=serializer)


class _Parser:
    """Wraps one method. parse: makes a message from bytes."""

    def __init__(self, method: str, parse: Callable[[bytes], Any], metrics: ServiceMetrics) -> None:
        self._method, self._parse, self._metrics = method.removeprefix("/"), parse, metrics

    def parsing(self, behavior: Callable[..., Any], parsed: Callable[[Any], Any]) -> Callable[..., Any]:
        """The method of the same kind, which gets what `parsed` makes of its request: gRPC tells a coroutine from what takes a thread by
        the function's kind."""

        async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._checked_coroutine(context):
                return await behavior(parsed(request), context)

        async def writing(request: Any, context: grpc.aio.ServicerContext) -> None:
            async with self._checked_coroutine(context):
                async for reply in behavior(parsed(request), context):
                    await context.write(reply)

        def generator(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._checked(context):
                yield from behavior(parsed(request), context)

        def function(request: Any, context: grpc.ServicerContext) -> Any:
            with self._checked(context):
                return behavior(parsed(request), context)

        if iscoroutinefunction(behavior):
            return coroutine
        if isasyncgenfunction(behavior):
            return writing
        return generator if isgeneratorfunction(behavior) else function

    def one(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError:
            raise invalid(f"request: {len(data)} bytes that are no message of {self._method}") from None

    def each(self, requests: Any) -> Any:
        """Parses each request of a stream when it is read.

        requests: an iterator of bytes, asynchronous for a coroutine."""
        return self._each(requests) if hasattr(requests, "__aiter__") else map(self.one, requests)

    async def _each(self, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield self.one(data)

    def _checked(self, context: grpc.ServicerContext):
        return checked_call(self._method, context, self._metrics)

    def _checked_coroutine(self, context: grpc.aio.ServicerContext):
        return checked_coroutine(self._method, context, self._metrics)
