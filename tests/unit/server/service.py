"""A real service in this process, on a free port of loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from datastore_service.endpoint import parse_endpoint
from datastore_service.engine.engine import Limits
from datastore_service.server.engines import engine_maker
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.service import Service

VOCAB = 1000


@contextmanager
def running(
    limits: ServiceLimits | None = None, token: str = "", engine_limits: Limits | None = None, **options
) -> Iterator[Service]:
    maker = engine_maker(None, VOCAB, engine_limits)
    service = Service(parse_endpoint("127.0.0.1:0"), maker, limits, token, **options)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)
