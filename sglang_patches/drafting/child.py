"""One run of the draft process, as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_patches.exchange.connection import READ_BYTES, SOCKET_VARIABLE

TAIL_LINES = 25
_TAIL_BYTES = 1 << 14


class Child:
    """A program in a session of its own, with a socket to it. Its output is appended to `log`.

    To be made in a thread that lives longer than the program: Linux takes the end of that thread for the end of the parent
    (PR_SET_PDEATHSIG).
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Starts the program. Raises OSError.

        environment: what differs from this process's.
        """
        self._log = log
        self.socket, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._log_start = output.tell()
            environment = os.environ | environment | {SOCKET_VARIABLE: str(theirs.fileno())}
            self._process = self._start(command, environment, theirs.fileno(), output.fileno())
        self._exit = os.pidfd_open(self._process.pid)
        self._events = select.poll()
        self._events.register(self.socket, select.POLLIN)
        self._events.register(self._exit, select.POLLIN)

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptor: int, output: int
    ) -> subprocess.Popen:
        """Runs the program in a session of its own.

        descriptor: of the program's end of the socket.
        output: descriptor of what it prints to.
        """
        return subprocess.Popen(
            command,
            env=environment,
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self, seconds: float | None) -> bytes:
        """What has come over the socket, waited for; nothing when there is no more to come. Raises TimeoutError."""
        events = dict(self._events.poll(None if seconds is None else max(0.0, seconds) * 1e3))
        if not events:
            raise TimeoutError
        if self.socket.fileno() not in events:
            return b""  # it has ended, although a child of its own holds the socket
        try:
            return self.socket.recv(READ_BYTES)
        except ConnectionResetError:  # it has ended with messages unread
            return b""

    def hang_up(self) -> None:
        """The program sees the end of the socket, and so do all who use the socket here."""
        with contextlib.suppress(OSError):  # done before
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self, grace: float) -> int:
        """Hangs up, waits `grace` seconds for the program to end, then kills its process group. Returns its exit status, negative:
        the signal that ended it. Nobody may use the socket any more."""
        self.hang_up()
        exited = select.poll()
        exited.register(self._exit, select.POLLIN)
        exited.poll(grace * 1e3)
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        os.close(self._exit)
        self.socket.close()
        return status

    def tail(self) -> str:
        """The last lines that this run has logged, or why they cannot be read."""
        try:
            with self._log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return str(error)
        return "\n".join(lines[-TAIL_LINES:])
