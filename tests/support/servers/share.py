"""A real Redis server of the loopback, as services share text over. It keeps what it has answered, through a kill -9."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from sglang_patches.launch.processes import Child, free_port, wait_until
from sglang_patches.launch.serve import HOST
from tests.support.system import require

START_SECONDS = 60.0


class ShareServer:
    """One server on one port; it can be killed and started again there. flags: further words of its command line."""

    def __init__(self, folder: Path, *flags: str) -> None:
        require("redis-server")
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._log = free_port(), folder / "log"
        self.url = f"valkey://{HOST}:{self.port}"
        self._command = [
            "redis-server", "--bind", HOST, "--port", str(self.port), "--dir", str(folder), "--save", "", "--appendonly", "yes", *flags,
        ]  # fmt: skip
        self._child: Child | None = None
        self.client = Redis(HOST, self.port)

    def start(self) -> ShareServer:
        self._child = Child("share", self._command, {}, self._log, show=False)
        wait_until(self._answers, [self._child], poll_seconds=0.05, seconds=START_SECONDS)
        return self

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()

    def pause(self) -> None:
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except RedisError:
            return False

    def __enter__(self) -> ShareServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self._child is not None and self._child.status is None:
            self.kill()
