"""The service under test: a process that is killed, stopped, restarted and weighed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proto_gen.specstore.v1 import admin_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from sglang_patches.launch.processes import free_port
from tests.soak.tenant import CHANNEL_OPTIONS

START_SECONDS = 120.0
STOP_SECONDS = 60.0
WEIGH_SECONDS = 0.25


class ServiceError(Exception):
    """The service did not start, or did not end as it should."""


class ServiceProcess:
    """`specstore serve` at the same address and with the same data each time. peak: bytes, over all its lives."""

    def __init__(self, folder: Path, token: str, *flags: object) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.log, self.data = folder / "service.log", folder / "data"
        self.data.mkdir()
        self._token = token
        words = [sys.executable, "-m", "datastore_service.cli.main", "serve", "--listen", self.endpoint]
        self._command = [*words, "--data", str(self.data), "--log-level", "warning", *map(str, flags)]
        self.peak = self.starts = 0
        self._process: subprocess.Popen | None = None
        threading.Thread(target=self._weigh, daemon=True).start()

    def start(self) -> None:
        """Returns when it serves. Raises ServiceError if it does not."""
        with self.log.open("ab") as log:
            environment = os.environ | {"SPECSTORE_ADMIN_TOKEN": self._token}
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.starts += 1
        limit = time.monotonic() + START_SECONDS
        while not self._serves():
            if self._process.poll() is not None or time.monotonic() > limit:
                raise ServiceError(
                    f"the service does not serve, status {self._process.poll()}: {self.log.read_text()[-2000:]}"
                )
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """Raises ServiceError if it does not drain and end with status 0."""
        self._process.terminate()
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceError(f"the service did not end within {STOP_SECONDS:.0f} s of SIGTERM") from None
        if status != 0:
            raise ServiceError(f"the service ended with status {status} after SIGTERM")

    def end(self) -> None:
        """Whatever its state."""
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def pause(self, seconds: float) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self._process.pid, signal.SIGCONT)

    @property
    def died(self) -> bool:
        return self._process.poll() is not None

    @property
    def descriptors(self) -> int:
        return psutil.Process(self._process.pid).num_fds()

    @property
    def nbytes(self) -> int:
        """Resident now."""
        return psutil.Process(self._process.pid).memory_info().rss

    def stats(self) -> admin_pb2.StatsReply:
        with grpc.insecure_channel(self.endpoint, CHANNEL_OPTIONS) as channel:
            metadata = (("authorization", f"Bearer {self._token}"),)
            return AdminStub(channel).Stats(admin_pb2.StatsRequest(), timeout=STOP_SECONDS, metadata=metadata)

    def tracebacks(self) -> list[str]:
        """What the logs say of exceptions that nobody expected."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line["traceback"] for line in lines if "traceback" in line]

    def _serves(self) -> bool:
        with grpc.insecure_channel(self.endpoint, CHANNEL_OPTIONS) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def _weigh(self) -> None:
        while True:
            time.sleep(WEIGH_SECONDS)
            if self._process is not None and self._process.poll() is None:
                try:
                    self.peak = max(self.peak, self.nbytes)
                except psutil.NoSuchProcess:  # it was killed just now
                    continue
