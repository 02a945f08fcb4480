"""Stands around every call of the service: asks who calls, and parses requests in the call itself, so that bytes that are no message
are refused like other bad input.

By default gRPC for Python (1.85) parses a request before the call sees it, and answers such bytes with a status of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from datastore_service.server.admission import NEEDS
from datastore_service.server.calls import Call, Calls
from datastore_service.server.refusal import invalid


class EveryCall(grpc.aio.ServerInterceptor):
    """Methods get messages as usual, of callers who may say them. A call that no right is known for is not served."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method.removeprefix("/")
        if handler is None or method not in NEEDS:
            return None
        wrapped = _Method(method, handler.request_deserializer, self._calls)
        serializer = handler.response_serializer
        if handler.stream_stream:
            call = wrapped.answering(handler.stream_stream, wrapped.each)
            return grpc.stream_stream_rpc_method_handler(call, response_serializer=serializer)
        if handler.stream_unary:
            call = wrapped.answering(handler.stream_unary, wrapped.each)
            return grpc.stream_unary_rpc_method_handler(call, response_serializer=serializer)
        if handler.unary_stream:
            call = wrapped.answering(handler.unary_stream, wrapped.one)
            return grpc.unary_stream_rpc_method_handler(call, response_serializer=serializer)
        call = wrapped.answering(handler.unary_unary, wrapped.one)
        return grpc.unary_unary_rpc_method_handler(call, response_serializer=serializer)


class _Method:
    """One method. parse: makes a message from bytes."""

    def __init__(self, method: str, parse: Callable[[bytes], Any], calls: Calls) -> None:
        self._method, self._parse, self._calls = method, parse, calls

    def answering(
        self, behavior: Callable[..., Any], heard: Callable[[Call, Any], Any]
    ) -> Callable[..., Any]:
        """The method of the same kind, which gets what `heard` makes of its request: gRPC tells a coroutine from what takes a thread by
        the function's kind."""

        async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._calls.answered_in_task(self._method, context) as call:
                return await behavior(heard(call, request), context)

        async def writing(request: Any, context: grpc.aio.ServicerContext) -> None:
            async with self._calls.answered_in_task(self._method, context) as call:
                async for reply in behavior(heard(call, request), context):
                    await context.write(reply)

        async def generating(request: Any, context: grpc.aio.ServicerContext) -> None:
            # A thread has each step of the generator. gRPC would run all of it in one, and lose a refusal that overtakes a reply.
            async with self._calls.answered_in_task(self._method, context) as call:
                replies = behavior(heard(call, request), context)
                while (reply := await asyncio.to_thread(next, replies, None)) is not None:
                    await context.write(call.said(reply))

        def function(request: Any, context: grpc.ServicerContext) -> Any:
            with self._calls.answered(self._method, context) as call:
                return call.said(behavior(heard(call, request), context))

        if iscoroutinefunction(behavior):
            return coroutine
        if isasyncgenfunction(behavior):
            return writing
        return generating if isgeneratorfunction(behavior) else function

    def one(self, call: Call, data: bytes) -> Any:
        return call.heard(self._parsed(data))

    def each(self, call: Call, requests: Any) -> Any:
        """Parses each request of a stream when it is read.

        requests: an iterator of bytes, asynchronous for a coroutine."""
        if hasattr(requests, "__aiter__"):
            return self._each(call, requests)
        return (self.one(call, data) for data in requests)

    async def _each(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield self.one(call, data)

    def _parsed(self, data: bytes) -> Any:
        try:
            return self._parse(data)
        except DecodeError:
            raise invalid(f"request: {len(data)} bytes that are no message of {self._method}") from None
