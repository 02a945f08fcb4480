"""A real service in this process, on a free port of loopback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from datastore_service.endpoint import parse_endpoint
from datastore_service.engine.limits import Limits
from datastore_service.server.engine_factory import engine_factory
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.prior_file import NamedPrior
from datastore_service.server.service import Service
from datastore_service.server.web import WebServer

VOCAB = 1000


@contextmanager
def running(
    limits: ServiceLimits | None = None,
    token: str = "",
    engine_limits: Limits | None = None,
    listen: str = "127.0.0.1:0",
    named: Mapping[str, NamedPrior] | None = None,
    **options,
) -> Iterator[Service]:
    maker = engine_factory(None, VOCAB, engine_limits, named=named)
    service = Service(parse_endpoint(listen), maker, limits, token, **options)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """The URL of its status page; metrics are below it."""
    server = WebServer(service.web_application(), 0)
    try:
        yield server.url
    finally:
        server.close()
