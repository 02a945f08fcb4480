"""Real datastore services, started and stopped by benchmarks and by the tests that need one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc

from datastore_service.client.channel import open_channel
from datastore_service.tls import Tls
from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from sglang_patches.launch.processes import Child, free_port, wait_until
from sglang_patches.launch.serve import HOST, SPECSTORE, datastore_healthy
from tests.support.servers.pausing import pause

START_SECONDS = 120.0
CALL_SECONDS = 60.0


class DatastoreService:
    """`specstore serve` on one port of the loopback; it can be killed, paused and started again there.

    log: its output. flags: further words of its command line. token: of its admin calls. tls: of a client of it."""

    def __init__(self, log: Path, *flags: object, token: str = "", tls: Tls | None = None) -> None:
        self.port, self.log = free_port(), log
        self.endpoint = f"{HOST}:{self.port}"
        self._command = [*SPECSTORE, "serve", "--listen", self.endpoint, *map(str, flags)]
        self._token, self._tls = token, tls
        self._child: Child | None = None

    def start(self) -> DatastoreService:
        """Returns when it serves; raises ChildDiedError if it ends before, TimeoutError if it takes too long."""
        environment = {"SPECSTORE_ADMIN_TOKEN": self._token} if self._token else {}
        self._child = Child("datastore", self._command, environment, self.log, show=False)
        wait_until(self.serving, [self._child], poll_seconds=0.05, seconds=START_SECONDS)
        return self

    def serving(self) -> bool:
        """Whether its health service says so."""
        return datastore_healthy(self.port, self._tls)

    @property
    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError("the datastore has not been started")
        return self._child

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.status is None

    def wait(self, seconds: float) -> int:
        """Its exit status, once it has ended; raises subprocess.TimeoutExpired."""
        return self._started.wait(seconds)

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            pause(self.pid)
        else:
            os.kill(self.pid, number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self._started.kill()

    def logs(self) -> str:
        return self.log.read_text()

    def stats(self) -> admin_pb2.StatsReply:
        with self._channel() as channel:
            return AdminStub(channel).Stats(admin_pb2.StatsRequest(), **self._call)

    def sessions(self) -> int:
        """How many are open."""
        return sum(namespace.sessions for namespace in self.stats().namespaces)

    def flush(self) -> None:
        """Empties the live tier of every namespace."""
        with self._channel() as channel:
            admin = AdminStub(channel)
            for namespace in admin.ListNamespaces(admin_pb2.ListNamespacesRequest(), **self._call).namespaces:
                admin.Flush(
                    admin_pb2.FlushRequest(namespace=namespace, tier=admin_pb2.TIER_LIVE), **self._call
                )

    @property
    def _call(self) -> dict:
        metadata = [("authorization", f"Bearer {self._token}")] if self._token else None
        return {"timeout": CALL_SECONDS, "metadata": metadata}

    def _channel(self) -> grpc.Channel:
        return open_channel(self.endpoint, self._tls)

    def __enter__(self) -> DatastoreService:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Whatever became of it."""
        if self.running:
            self.kill()
