"""Bounds the calls that last as long as their caller wants. Each takes a thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

MAX_OPEN_CALLS = 8  # of each method


class CallLimit(grpc.ServerInterceptor):
    """Applies to every method whose requests are a stream, except `unbounded`, which has a bound of its own. A call above
    the limit is answered with RESOURCE_EXHAUSTED."""

    def __init__(self, unbounded: str) -> None:
        """unbounded: "/package.Service/Method"."""
        self._unbounded = unbounded
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = handler_call_details.method
        handler = continuation(handler_call_details)
        if handler is None or not handler.request_streaming or method == self._unbounded:
            return handler
        codec = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(self._replies(method, handler.stream_stream), *codec)
        return grpc.stream_unary_rpc_method_handler(self._reply(method, handler.stream_unary), *codec)

    def _reply(self, method: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def bounded(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._counted(method, context):
                return answer(requests, context)

        return bounded

    def _replies(self, method: str, answer: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def bounded(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._counted(method, context):
                yield from answer(requests, context)

        return bounded

    @contextmanager
    def _counted(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        with self._lock:
            free = self._open[method] < MAX_OPEN_CALLS
            self._open[method] += free
        if not free:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{method}: {MAX_OPEN_CALLS} such calls are open, the limit",
            )
        try:
            yield
        finally:
            with self._lock:
                self._open[method] -= 1
