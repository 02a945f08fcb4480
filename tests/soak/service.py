"""The service under test: a process that is killed, stopped, restarted and weighed."""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil

from sglang_patches.launch.processes import ChildDiedError
from tests.support.servers.datastore import DatastoreService

STOP_SECONDS = 60.0
WEIGH_SECONDS = 0.25


class ServiceError(Exception):
    """The service did not start, or did not end as it should."""


class ServiceProcess(DatastoreService):
    """`specstore serve` at the same address and with the same data each time. peak: bytes, over all its lives. stops: how often it was
    told to stop and has stopped, odd in between; for client processes too."""

    def __init__(self, folder: Path, token: str, *flags: object) -> None:
        self.data = folder / "data"
        self.data.mkdir()
        words = ("--data", self.data, "--log-level", "warning", *flags)
        super().__init__(folder / "service.log", *words, token=token)
        self.peak = self.starts = 0
        self.stops = multiprocessing.get_context("spawn").Value("q", 0)
        threading.Thread(target=self._weigh, daemon=True).start()

    def start(self) -> ServiceProcess:
        """Returns when it serves. Raises ServiceError if it does not."""
        self.starts += 1
        try:
            super().start()
        except (ChildDiedError, TimeoutError) as error:
            raise ServiceError(f"the service does not serve: {error}") from error
        return self

    def terminate(self) -> None:
        """Raises ServiceError if it does not drain and end with status 0."""
        self.stops.value += 1
        self.signal(signal.SIGTERM)
        try:
            status = self.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServiceError(f"the service did not end within {STOP_SECONDS:.0f} s of SIGTERM") from None
        finally:
            self.stops.value += 1
        if status != 0:
            raise ServiceError(f"the service ended with status {status} after SIGTERM")

    def pause_for(self, seconds: float) -> None:
        self.pause()
        time.sleep(seconds)
        self.resume()

    @property
    def descriptors(self) -> int:
        return psutil.Process(self.pid).num_fds()

    @property
    def nbytes(self) -> int:
        """Resident now."""
        return psutil.Process(self.pid).memory_info().rss

    def tracebacks(self) -> list[str]:
        """What the logs say of exceptions that nobody expected."""
        lines = [json.loads(line) for line in self.logs().splitlines() if line.startswith("{")]
        return [line["traceback"] for line in lines if "traceback" in line]

    def _weigh(self) -> None:
        while True:
            time.sleep(WEIGH_SECONDS)
            if self.running:
                try:
                    self.peak = max(self.peak, self.nbytes)
                except psutil.NoSuchProcess:  # it was killed just now
                    continue
