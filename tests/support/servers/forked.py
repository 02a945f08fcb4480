"""SGLang servers of tests: what `engine` and `split` start by command, forked from one process that has SGLang imported.

Tests of public commands start those commands; this is for tests that need a server, whoever started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from sglang_patches.launch.processes import Child
from sglang_patches.launch.serve import CPU_SPLIT_ENVIRONMENT
from sglang_patches.launch.system import SPLIT
from tests.support.fork_server import MESSAGE, READ_LATE
from tests.support.servers import engine, split
from tests.support.servers.engine import ServerSpec
from tests.support.system import require

# What a server's processes import.
SGLANG = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
)
DRAFT_PROCESS, DRAFT_PROGRAMS = "sglang_patches.draft_process", "tests.support.draft_programs"
FORKABLE = {
    "OMP_WAIT_POLICY": CPU_SPLIT_ENVIRONMENT["OMP_WAIT_POLICY"],  # the halves of a split ask for it
    "OPENBLAS_NUM_THREADS": "1",  # it would start the others while it is imported
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # as above: SGLang 0.5.17 imports pyarrow
}


class ForkServer:
    """A process that has `modules` imported with these variables; it ends with this one, and what it forked with it."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self.environment = os.environ | variables
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(
            command, env=self.environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(self._socket.close)
        self._lock, self._news = threading.Lock(), threading.Condition()
        self._started: list[int] = []
        self._statuses: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, module: str, words: list[str], environment: Mapping[str, str]) -> ForkedProcess:
        """`python -m module words`."""
        reading, writing = os.pipe()
        request = {"module": module, "words": words, "environment": dict(environment)}
        with self._lock:
            with contextlib.suppress(BrokenPipeError):  # it has ended: told below
                socket.send_fds(self._socket, [json.dumps(request).encode()], [writing])
            os.close(writing)
            with self._news:
                self._news.wait_for(lambda: self._started or not self.alive)
                if not self._started:
                    raise RuntimeError(f"the fork server ended with status {self._process.wait()}")
                return ForkedProcess(self, self._started.pop(), os.fdopen(reading, errors="replace"))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def status(self, pid: int, timeout: float | None = 0) -> int | None:
        """Of one that has ended within so many seconds."""
        with self._news:
            self._news.wait_for(lambda: pid in self._statuses or not self.alive, timeout)
            return self._statuses.get(pid, None if self.alive else -signal.SIGKILL)

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # it ended before it read all that was asked
            while message := self._socket.recv(MESSAGE):
                news = json.loads(message)
                with self._news:
                    if "started" in news:
                        self._started.append(news["started"])
                    else:
                        self._statuses[news["ended"]] = news["status"]
                    self._news.notify_all()
        with self._news:
            self._process.wait()
            self._news.notify_all()


class ForkedProcess:
    """What `Child` uses of a subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int, stdout: io.TextIOBase) -> None:
        self.pid, self.stdout, self._server = pid, stdout, server

    def poll(self) -> int | None:
        return self._server.status(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        status = self._server.status(self.pid, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)


def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """The one of this test run for servers with these variables (`READ_LATE` tells which need one of their own); started by the first
    test that needs it."""
    early = {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}
    return _fork_server(tuple(sorted((FORKABLE | early).items())))


@functools.cache
def _fork_server(variables: tuple[tuple[str, str], ...]) -> ForkServer:
    return ForkServer(SGLANG, dict(variables))


class ForkedChild(Child):
    """A process of a fork server, in the place of one that its command starts."""

    def _start(self, command: list[str], environment: dict[str, str]) -> ForkedProcess:
        python, flag, module, *words = command
        assert (python, flag) == (sys.executable, "-m")
        return fork_server(environment).fork(module, words, os.environ | environment)


class SglangServer(engine.SglangServer):
    child = ForkedChild

    def stop(self) -> None:
        """At once: SGLang looks every five seconds whether it has been told to end, and a test has nothing to lose."""
        self.kill()


def draft_processes(server: SglangServer) -> list[psutil.Process]:
    """Its draft processes, and the programs that stand in for one."""
    return [child for child in psutil.Process(server.pid).children(recursive=True) if _drafts(child)]


def _drafts(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline()).split()  # the title of a forked one is a single word
        return words[1:3] in (["-m", DRAFT_PROCESS], ["-m", DRAFT_PROGRAMS])
    except psutil.NoSuchProcess:
        return False


class Split(split.Split):
    server = SglangServer


def running(spec: ServerSpec, folder: Path) -> AbstractContextManager[SglangServer]:
    """As `tests.support.servers.engine.running`."""
    return engine.healthy(SglangServer(spec, folder / f"{spec.name}.log"))


def running_split(spec: ServerSpec, folder: Path, **size) -> AbstractContextManager[Split]:
    """As `tests.support.servers.split.split`."""
    require(*SPLIT)
    return engine.healthy(Split(spec, folder, **size))
