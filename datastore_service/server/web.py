"""Serves the status page at /, metrics for Prometheus at /metrics and what a supervisor probes, over HTTP."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from waitress import create_server  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CONNECTIONS = 100  # further ones wait in the kernel, without a file descriptor
SILENT_SECONDS = 5  # after which a connection that says nothing is closed
_BOUNDS: dict[str, Any] = {
    "connection_limit": CONNECTIONS,
    "channel_timeout": SILENT_SECONDS,
    "cleanup_interval": 1,  # seconds between two looks for silent ones
    "asyncore_use_poll": True,  # select() takes no descriptor above 1023
    "ident": None,
}
_TEXT = (("Content-Type", "text/plain; charset=utf-8"),)
_HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),
    ("X-Content-Type-Options", "nosniff"),
)


Probe = Callable[[], str]  # returns what is wrong, "" if nothing is


def application(
    html: Callable[[], str], registry: CollectorRegistry, probes: Mapping[str, Probe]
) -> WSGIApplication:
    """The application that serves the status page, the metrics and the probes.

    html: returns the status page. probes: by path."""
    metrics = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        if path != "/" and path not in probes:
            start_response("404 Not Found", list(_TEXT))
            return [f"there are {', '.join(['/', '/metrics', *probes])}\n".encode()]
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return [b""]
        if path in probes:
            return _probed(probes[path](), start_response)
        start_response("200 OK", list(_HEADERS))
        return [html().encode()]

    return answer


def _probed(wrong: str, start_response: StartResponse) -> Iterable[bytes]:
    start_response("503 Service Unavailable" if wrong else "200 OK", [*_TEXT, ("Cache-Control", "no-store")])
    return [f"{wrong or 'ok'}\n".encode()]


class WebServer:
    """Serves on a thread until it is closed. host: an IPv4 address or a name of one.

    Raises OSError naming the option if the port is not free or the address is not this machine's."""

    def __init__(self, app: WSGIApplication, port: int, host: str = LOOPBACK) -> None:
        try:
            self._server = create_server(app, host=host, port=port, **_BOUNDS)
        except OSError as error:
            option = f"metrics-port: {port}" if host == LOOPBACK else f"metrics-host: {host}:{port}"
            raise OSError(f"{option}: {error.strerror}") from None
        self.url = f"http://{host}:{self._server.effective_port}/"
        threading.Thread(target=self._server.run, name="specstore-http", daemon=True).start()
        log.info("status page and metrics", extra={"url": self.url})

    def close(self) -> None:
        self._server.task_dispatcher.shutdown()  # an answer that ended later would wake a closed server
        self._server.trigger.pull_trigger(self._server.close)  # on the server's own thread
