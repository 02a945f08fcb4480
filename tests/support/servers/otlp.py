"""An OTLP collector in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc


@contextmanager
def collecting(servicer: Any, add: Callable[[Any, grpc.Server], None]) -> Iterator[Any]:
    """Serves what keeps the exports of a signal, and gives it an `endpoint`. add: the generated function that adds it to a server."""
    server = grpc.server(ThreadPoolExecutor(2))
    add(servicer, server)
    servicer.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(0).wait()
