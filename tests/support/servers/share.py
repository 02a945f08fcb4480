"""A real Redis server of the loopback, as services share text over. It keeps what it has answered, through a kill -9."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from sglang_patches.launch.processes import Child, free_port, wait_until
from sglang_patches.launch.serve import HOST
from tests.support.servers.pausing import pause
from tests.support.system import require
from tests.unit.certificates import Files

START_SECONDS = 60.0


class ShareServer:
    """One server on one port; it can be killed and started again there.

    tls: its certificate; None for plain text. asks: refuses clients without a certificate of the same authority, for which its own does too."""

    def __init__(self, folder: Path, tls: Files | None = None, asks: bool = False) -> None:
        require("redis-server")
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._log = free_port(), folder / "log"
        self.url = f"valkey{'s' if tls else ''}://{HOST}:{self.port}"
        self._command = [
            "redis-server",
            "--bind",
            HOST,
            "--dir",
            str(folder),
            "--save",
            "",
            "--appendonly",
            "yes",
        ]
        self._command += _tls_words(self.port, tls, asks) if tls else ["--port", str(self.port)]
        self._child: Child | None = None
        self.client = Redis(HOST, self.port, **(_client_words(tls) if tls else {}))

    def start(self) -> ShareServer:
        self._child = Child("share", self._command, {}, self._log, show=False)
        wait_until(self._answers, [self._child], poll_seconds=0.05, seconds=START_SECONDS)
        return self

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()

    def pause(self) -> None:
        assert self._child is not None
        pause(self._child.pid)

    def resume(self) -> None:
        assert self._child is not None
        os.kill(self._child.pid, signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except RedisError:
            return False

    def __enter__(self) -> ShareServer:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Whatever became of it."""
        self.client.close()
        if self._child is not None and self._child.status is None:
            self.kill()


def _tls_words(port: int, tls: Files, asks: bool) -> list[str]:
    files = {"cert": tls.certificate, "key": tls.key, "ca-cert": tls.ca}
    words = [word for name, path in files.items() for word in (f"--tls-{name}-file", str(path))]
    return ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "yes" if asks else "no", *words]


def _client_words(tls: Files) -> dict:
    """Those of the client that looks after it."""
    files = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    return {"ssl": True, "ssl_check_hostname": False} | {name: str(path) for name, path in files.items()}
