"""A real datastore service process, and a proxy that makes it slow."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from datastore_service.protocol.tree import Tier
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from sglang_patches.launch.processes import Child, free_port, wait_until

START_SECONDS = 120.0
TOKEN = "end-to-end"
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)


class DatastoreService:
    """`specstore serve` on one port; it can be killed, paused and started again there."""

    def __init__(self, log: Path, prior: Path | None = None, *flags: str) -> None:
        self.port, self._log, self._prior, self._flags = free_port(), log, prior, flags
        self.endpoint = f"127.0.0.1:{self.port}"
        self._child: Child | None = None

    def start(self) -> None:
        words = [sys.executable, "-m", "datastore_service.cli.main", "serve", "--listen", self.endpoint]
        words += ["--prior", str(self._prior)] if self._prior else []
        environment = {"SPECSTORE_ADMIN_TOKEN": TOKEN}
        self._child = Child("datastore", [*words, *self._flags], environment, self._log, show=False)
        limit = time.monotonic() + START_SECONDS
        wait_until(lambda: self._serving() or time.monotonic() > limit, [self._child], poll_seconds=0.2)
        if not self._serving():
            raise TimeoutError(f"the datastore was not healthy in time:\n{self._child.tail()}")

    def _serving(self) -> bool:
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(self.endpoint) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
            return answer.status == health_pb2.HealthCheckResponse.SERVING
        return False

    def sessions(self) -> int:
        """How many are open."""
        with grpc.insecure_channel(self.endpoint) as channel:
            stats = AdminStub(channel).Stats(admin_pb2.StatsRequest(), timeout=60, metadata=AUTHORIZED)
        return sum(namespace.sessions for namespace in stats.namespaces)

    def flush(self) -> None:
        """Empties the live tier of every namespace."""
        with grpc.insecure_channel(self.endpoint) as channel:
            admin = AdminStub(channel)
            listed = admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), timeout=60, metadata=AUTHORIZED)
            for namespace in listed.namespaces:
                request = admin_pb2.FlushRequest(namespace=namespace, tier=Tier.LIVE)
                admin.Flush(request, timeout=60, metadata=AUTHORIZED)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        os.kill(self._child.pid, number)

    def stop(self) -> None:
        if self._child is not None and self._child.status is None:
            self.resume()
            self._child.stop()


@contextlib.contextmanager
def serving(log: Path, prior: Path | None = None, *flags: str) -> Iterator[DatastoreService]:
    """A service that answers at the beginning of the block and is stopped at its end, whatever became of it."""
    service = DatastoreService(log, prior, *flags)
    try:
        service.start()
        yield service
    finally:
        service.stop()


class SlowProxy:
    """Forwards TCP connections to a port; each chunk waits `delay` seconds."""

    def __init__(self) -> None:
        self.delay = 0.0
        self._target: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def redirect(self, target: int) -> None:
        """New connections go to this port of the machine."""
        self._target = target

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target or 0))
            except OSError:  # nobody there: the client sees a closed connection
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                time.sleep(self.delay)
                sink.sendall(chunk)
        for end in (source, sink):  # shutdown, not close: it wakes the thread that reads the other direction
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
