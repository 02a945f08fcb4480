"""Engines of a check: one at a time, each in a process of its own, kept as long as the next part asks the same one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

TIMEOUT_SECONDS = 540.0  # of a start, and of a task
POLL_SECONDS = 0.2  # whether a process that has not called yet has ended
STOP_SECONDS = 10.0  # then it is killed


class Process(Protocol):
    """What is used of a subprocess.Popen."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class EngineFailedError(RuntimeError):
    """An engine has ended; the message has its last lines."""


class Engine:
    """A running engine."""

    def __init__(self, flags: Sequence[str], log: Path) -> None:
        """Returns when it is ready. Raises EngineFailedError if it ends before that, TimeoutError if it takes too long."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{folder}/check")
            listening.listen()
            command = [sys.executable, "-m", "sglang_patches.check.engine", f"{folder}/check", *flags]
            self._process = self._start(command, log)
            with contextlib.ExitStack() as unless_ready:
                unless_ready.callback(self._kill)
                self._connection = self._accept(listening)
                self._receive()
                unless_ready.pop_all()

    def _start(self, command: Sequence[str], log: Path) -> Process:
        """The leader of a process group."""
        with log.open("w") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def _accept(self, listening: socket.socket) -> Connection:
        listening.settimeout(POLL_SECONDS)
        limit = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < limit:
            with contextlib.suppress(TimeoutError):
                return Connection(listening.accept()[0].detach())
            if self._process.poll() is not None:
                raise self._failure()
        raise self._lateness()

    def ask(self, task: str, **arguments: object) -> Any:
        """What `engine.TASKS[task]` returns. Raises as the start does."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: told below
            self._connection.send((task, arguments))
        return self._receive()

    def _receive(self) -> Any:
        if not self._connection.poll(TIMEOUT_SECONDS):
            raise self._lateness()
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failure() from None

    def _failure(self) -> EngineFailedError:
        return EngineFailedError(last_words(self._log.read_text(errors="replace")))

    def _lateness(self) -> TimeoutError:
        return TimeoutError(f"an engine took more than {TIMEOUT_SECONDS:.0f} s: {self._log}")

    def stop(self) -> None:
        """Hangs up, and kills what is left of it."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Engines:
    """The engine that runs now. folder: for the logs. A context: at its end no engine runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flags: Sequence[str] = ()
        self._running: Engine | None = None

    def ask(self, name: str, flags: Sequence[str], task: str, **arguments: object) -> Any:
        """Asks the engine with these flags, as `Engine.ask` does. An engine that fails is stopped.

        name: of its log, without `.log`.
        """
        engine = self.get(name, flags)
        try:
            return engine.ask(task, **arguments)
        except Exception:
            self.stop()
            raise

    def get(self, name: str, flags: Sequence[str]) -> Engine:
        """The engine with these flags: the one that runs, or a new one in its place."""
        if self._running is None or list(flags) != list(self._flags):
            self.stop()
            self._running = Engine(flags, self._folder / f"{name}.log")
            self._flags = flags
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def last_words(log: str) -> str:
    """The lines of a log in which specstore says what is wrong, else its last lines. At most three lines and 600 characters."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and "specstore" in line] or lines[-3:]
    return " / ".join(errors[-3:])[:600]
