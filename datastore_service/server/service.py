"""The running service: gRPC server, health, reflection, metrics, housekeeping, graceful shutdown."""

from __future__ import annotations

import faulthandler
import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from datastore_service.endpoint import Endpoint
from datastore_service.server.addresses import check_exposure, check_free
from datastore_service.server.admin import Admin
from datastore_service.server.admission import ADMIN, DRAFTING
from datastore_service.server.calls import Calls
from datastore_service.server.corpora import Corpora
from datastore_service.server.descriptors import most_connections
from datastore_service.server.drafting import Drafting
from datastore_service.server.history import History
from datastore_service.server.identities import Identities, OneToken, Table
from datastore_service.server.interceptor import EveryCall
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.metrics import ServiceMetrics
from datastore_service.server.namespaces import EngineFactory, Namespaces
from datastore_service.server.reloading import Reloading
from datastore_service.server.rpc_server import RpcServer
from datastore_service.server.shutdown import ShutdownSignals
from datastore_service.server.status_page import StatusPage
from datastore_service.server.web import LOOPBACK, WebServer, application
from datastore_service.storage.data_directory import DataDirectory
from datastore_service.tls import Tls, warn_of_end
from proto_gen.specstore.v1.admin_pb2_grpc import add_AdminServicer_to_server
from proto_gen.specstore.v1.drafting_pb2_grpc import add_DraftingServicer_to_server

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

    from datastore_service.server.sharing.address import ShareAddress
    from datastore_service.server.sharing.thread import Sharing

log = logging.getLogger(__name__)

CONNECTION_CALLS = 128  # that are open on one connection; further ones wait
HOUSEKEEPING_SECONDS = 1.0
CHECK_SECONDS = 3600.0  # between two checks of all segments, which are also verified at the start
SYNC_SECONDS = 1.0  # a power failure may take what was answered since the last sync
DRAIN_SECONDS = 10.0
LAST_REPLY_SECONDS = 0.5  # for replies to leave the process
ALIVE_SECONDS = 2.0  # in which a probe of the gRPC server must be answered
CALL_END_SECONDS = 2.0  # for cancelled calls to end
STDERR = 2
END_SECONDS = 30.0  # from the signal to the exit, even if merges or threads do not return


class Service:
    """Listens on `address` once started.

    new_engine: makes a namespace's engine and returns whether the prior is attached. token: what admin calls must carry,
    "" for none. table: says who may do what, in place of the token alone. tls: None for plain text. corpora: folder of the files that WarmupFile may read. data: keeps the live
    tiers; None keeps them in memory alone. share: the server over which it shares its live tiers with other services.

    Raises ValueError if other machines can reach the address and that is not allowed or there is no token, StorageError
    if stored text cannot be read.
    """

    def __init__(
        self,
        address: Endpoint,
        new_engine: EngineFactory,
        limits: ServiceLimits | None = None,
        token: str = "",
        allow_remote: bool = False,
        tls: Reloading[Tls] | None = None,
        corpora: Path | None = None,
        data: DataDirectory | None = None,
        table: Reloading[Table] | None = None,
        share: ShareAddress | None = None,
    ) -> None:
        check_exposure(address, bool(token or table), allow_remote)
        self._limits = limits or ServiceLimits()
        self.namespaces = Namespaces(new_engine, self._limits, data)
        self.metrics = ServiceMetrics(self.namespaces, self._limits)
        self.drafting = Drafting(self.namespaces, self._limits, self.metrics)
        self.history = History(self.namespaces)
        self.page = StatusPage(self.namespaces, self.history, lambda: self.drafting.streams)
        self._health = health.aio.HealthServicer()
        self._share = share
        self._sharing = self._shared_over(share) if share else None
        self._admin = Admin(self.namespaces, self.drafting, self._limits, Corpora(corpora), self._sharing)
        self._address, self._tls = address, tls
        self._reloading = [each for each in (tls, table) if each]
        self.metrics.count_refused_files(self._reloading)
        calls = Calls(_identities(table, token), self.metrics)
        self._server = RpcServer(self._add_servicers, [EveryCall(calls)], _server_options(self._limits))
        self._stopping = threading.Event()
        self.endpoint = ""

    def start(self) -> str:
        """Returns the endpoint (with the port that port 0 became). Raises OSError if the address is not free."""
        check_free(self._address)
        try:
            port = self._server.start(self._address, self._tls)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self._address}: {error}") from None
        self.endpoint = str(self._address) if self._address.path else f"{self._address.host}:{port}"
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        loops = {"housekeeping": self._keep_house, "sync": self._keep_synced, "check": self._keep_checked}
        for name, loop in loops.items():
            threading.Thread(target=loop, name=f"specstore-{name}", daemon=True).start()
        if self._sharing:
            self._sharing.start()
        log.info("serving", extra={"endpoint": self.endpoint, "tls": self._tls is not None})
        if not self._tls and not self._address.local:
            log.warning("no TLS: texts and tokens cross the network readable")
        self._warn_of_certificates()
        return self.endpoint

    def stop(self) -> None:
        """Finishes the replies in progress, ends the streams, closes the listener and the data directory; once."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._server.run(self._health.enter_graceful_shutdown())
        log.info("draining", extra={"streams": self.drafting.streams})
        if not self.drafting.drain(DRAIN_SECONDS):
            log.warning("drain: messages still unanswered", extra={"seconds": DRAIN_SECONDS})
        if not self._server.stop(LAST_REPLY_SECONDS, CALL_END_SECONDS):
            log.warning("drain: calls that do not end")
        if self._sharing:
            self._sharing.stop()
        self.namespaces.close()
        log.info("stopped")

    def _shared_over(self, share: ShareAddress) -> Sharing:
        from datastore_service.server.sharing.metrics import ShareMetrics
        from datastore_service.server.sharing.thread import Sharing

        return Sharing(share, self.namespaces, ShareMetrics(self.metrics.registry))

    def web_application(self) -> WSGIApplication:
        """The pages of the metrics port."""
        probes = {"/healthz": self._not_alive, "/readyz": self._not_ready}
        return application(self.page.html, self.metrics.registry, probes)

    def _not_alive(self) -> str:
        alive = self._stopping.is_set() or self._server.responds(ALIVE_SECONDS)  # it ends within END_SECONDS
        return "" if alive else f"the gRPC server has done nothing for {ALIVE_SECONDS:g} s"

    def _not_ready(self) -> str:
        if self._stopping.is_set():
            return "the service is shutting down"
        return self._not_alive() if self.endpoint else "the service has not started"

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        add_DraftingServicer_to_server(self.drafting, server)
        add_AdminServicer_to_server(self._admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (DRAFTING, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    def _set_health(self, status: int) -> None:
        for name in ("", DRAFTING, ADMIN):
            self._server.run(self._health.set(name, status))

    def _keep_house(self) -> None:
        while not self._stopping.wait(HOUSEKEEPING_SECONDS):
            for files in self._reloading:
                files.refresh()
            self.history.tick()
            self.namespaces.check_lengths()
            self._expire()
            closed = self.namespaces.close_expired()
            if closed:
                log.info("closed sessions nobody came back for", extra={"sessions": closed})

    def _expire(self) -> None:
        try:
            self.namespaces.expire(self._limits.snapshot_seconds)
        except OSError:  # the other chores go on; it is due again in a second
            log.exception("an old snapshot cannot be removed")

    def _keep_synced(self) -> None:
        while not self._stopping.wait(SYNC_SECONDS):
            self.namespaces.sync()

    def _keep_checked(self) -> None:
        while not self._stopping.wait(CHECK_SECONDS):
            self.namespaces.check_segments()
            self._warn_of_certificates()

    def _warn_of_certificates(self) -> None:
        if self._tls:
            warn_of_end("the TLS certificate", self._tls.value)
        if self._share:
            self._share.files.warn()


def serve(
    service: Service, most_bytes: dict[str, int], metrics_port: int | None, metrics_host: str = LOOPBACK
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process immediately. most_bytes: what the options permit,
    for the log. metrics_port: HTTP port of the status page and metrics, None for neither. metrics_host: the address that it listens
    on."""
    signals = ShutdownSignals()
    faulthandler.enable(
        STDERR
    )  # what ends the process without Python, as a fault in a mapping does, leaves a line
    if metrics_port is not None:
        WebServer(service.web_application(), metrics_port, metrics_host)
    service.start()
    log.info("memory at most", extra=most_bytes)
    gc.collect()
    gc.freeze()  # to collect what stays until the end, modules and texts, would hold up all answers for 130 to 410 ms
    signals.wait()
    signals.exit_within(END_SECONDS)
    service.stop()


def _identities(table: Reloading[Table] | None, token: str) -> Callable[[], Identities]:
    one = OneToken(token)
    return (lambda: table.value) if table else (lambda: one)


def _server_options(limits: ServiceLimits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        # Otherwise a second service on the same port would start and take half of the connections.
        ("grpc.so_reuseport", 0),
        # Workers ping an idle stream to notice a dead host. By default gRPC permits one ping in 5 minutes and ends the
        # connection at the third that comes sooner.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # The stream of a worker that has stopped, or whose machine has, ends after both: within ten seconds.
        ("grpc.keepalive_time_ms", 4_000),
        ("grpc.http2.ping_timeout_ms", 4_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A connection on which nobody speaks HTTP/2, or nobody calls, is closed; a client opens another one.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_connection_idle_ms", 300_000),
        ("grpc.max_concurrent_streams", CONNECTION_CALLS),
        ("grpc.max_allowed_incoming_connections", most_connections(limits.streams)),
    )
