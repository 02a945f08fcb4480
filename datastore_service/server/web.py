"""HTTP: the status page at /, metrics for Prometheus at /metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_HEADERS = (
    ("Content-Type", "text/html; charset=utf-8"),
    ("Cache-Control", "no-store"),
    ("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"),
    ("X-Content-Type-Options", "nosniff"),
)


def application(html: Callable[[], str], registry: CollectorRegistry) -> WSGIApplication:
    """html: returns the status page."""
    metrics = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return metrics(environ, start_response)
        if environ["PATH_INFO"] != "/":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"there are / and /metrics\n"]
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return [b""]
        start_response("200 OK", list(_HEADERS))
        return [html().encode()]

    return answer


def listen(app: WSGIApplication, port: int, host: str = LOOPBACK) -> WSGIServer:
    """Serves on a thread until `shutdown`. host: an IPv4 address or a name of one.

    Raises OSError naming the option if the port is not free or the address is not this machine's."""
    try:
        server = make_server(host, port, app, _Server, _QuietHandler)
    except OSError as error:
        option = f"metrics-port: {port}" if host == LOOPBACK else f"metrics-host: {host}:{port}"
        raise OSError(f"{option}: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, name="specstore-http", daemon=True).start()
    log.info("status page and metrics", extra={"url": f"http://{host}:{server.server_port}/"})
    return server


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not logged."""
