"""Child processes of the launcher, of benchmarks and of tests, each in its own process group and with its output logged."""

import contextlib
import itertools
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

PORTS_VARIABLE = "SPECSTORE_PORTS"  # FIRST-LAST: where `free_port` looks, of who runs beside others that do


def _shuffled_ports(wanted: str) -> Iterator[int]:
    """Those of FIRST-LAST, again and again."""
    # Linux gives outgoing connections the ports from 32768 upwards. A connection that only asks whether a server is up could get
    # the very port that this server is about to bind.
    first, last = map(int, (wanted or "20000-32767").split("-"))
    return itertools.cycle(random.sample(range(first, last + 1), k=last + 1 - first))


_ports = _shuffled_ports(os.environ.get(PORTS_VARIABLE, ""))

# An argument of `requests`: a proxy of the environment could not reach a loopback address. (With its `no_proxy` in this place it sets an
# environment variable for a moment, which breaks whoever reads the environment in another thread.)
PROXIES: dict[str, Any] = {"http": None, "https": None, "all": None}
STOP_SECONDS = 15
TAIL_LINES = 25
LOG_SECONDS = 10  # for the rest of a log; a child of the one that ended may keep it open
# Kept in the log, not shown: SGLang's whole configuration on one line, models this machine cannot load, our own polling.
HIDDEN = ("server_args=", "Ignore import error", "GET /health")


def say(text: str, end: str = "\n") -> bool:
    """Prints on standard error. False if nobody reads it any more, as behind `| head`: what it tells of must happen all the same."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except BrokenPipeError:
        return False
    return True


class Child:
    """A started command. `name` labels its lines; `log` receives all of them; `show` repeats them on standard error;
    `own_group`: if False, it stays in this process's group and is killed with it."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        log: Path,
        show: bool = True,
        own_group: bool = True,
    ) -> None:
        self.name = name
        self.log = log
        self._show = show
        self.unread = False  # whether what it said found no reader
        self._own_group = own_group
        log.touch()  # who asks for its tail may come before the reader
        self._process = self._start(command, environment)
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen:
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=self._own_group,  # Ctrl-C reaches the launcher alone, which then stops the children in order
            encoding="utf-8",  # whatever this process's locale has
            errors="replace",
        )

    def _copy_output(self) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            for line in self._process.stdout or ():
                log.write(line)
                log.flush()
                if self._show and not self.unread and not any(mark in line for mark in HIDDEN):
                    self.unread = not say(f"{self.name} | {line}", end="")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def wait(self, seconds: float | None) -> int:
        """Its exit status, once it has ended and its log is whole; raises subprocess.TimeoutExpired."""
        status = self._process.wait(seconds)
        self._reader.join(LOG_SECONDS)
        return status

    def tail(self) -> str:
        """The last lines of its log, for the message that says it died or is not ready."""
        if self.status is not None:
            self._reader.join(LOG_SECONDS)
        return "".join(
            self.log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-TAIL_LINES:]
        )

    def kill(self) -> None:
        """Kills its whole process group at once, or the process alone if it has no group of its own."""
        self._process.kill()
        if self._own_group:
            with contextlib.suppress(ProcessLookupError):  # no process is left
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ends its whole process group: the leader gets `STOP_SECONDS` to end its own children, then all are killed."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()


class ChildDiedError(RuntimeError):
    """A child ended while it was needed."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} ended with status {child.status}; {child.log} ends:\n{child.tail()}")


def require_running(children: list[Child]) -> None:
    """Raises `ChildDiedError` for the first child that has ended, and BrokenPipeError for one whose output nobody reads."""
    for child in children:
        if child.status is not None:
            raise ChildDiedError(child)
        if child.unread:
            raise BrokenPipeError(f"{child.name}: nobody reads its output")


def wait_until(
    ready: Callable[[], bool],
    children: list[Child],
    poll_seconds: float = 0.5,
    seconds: float = math.inf,
) -> None:
    """Returns once `ready()`; raises `ChildDiedError` when a child ends first, TimeoutError after so many seconds."""
    limit = time.monotonic() + seconds
    while not ready():
        require_running(children)
        if time.monotonic() > limit:
            waited = ", ".join(f"{child.name} ({child.log})" for child in children)
            raise TimeoutError(f"{waited}: not ready after {seconds:.0f} s:\n{children[-1].tail()}")
        time.sleep(poll_seconds)


@dataclass(frozen=True)
class Part:
    """One process of a stack."""

    name: str
    command: list[str]
    environment: dict[str, str]
    healthy: Callable[[], bool]


def run_stack(
    parts: list[Part],
    logs: Path,
    ready: Callable[[], None],
    restarts: bool = False,
    in_turn: bool = False,
) -> NoReturn:
    """Starts the parts, calls `ready` when all are healthy and runs until it is interrupted. Raises `ChildDiedError` if
    a part ends and BrokenPipeError if nobody reads the output. Stops the parts in the opposite order, because an engine would count the end of its datastore as a failure.

    restarts: a part that ends after it was healthy is started again instead. in_turn: a part is started once the one before it
    is healthy."""
    children: list[Child] = []
    try:
        for part in parts:
            children.append(_start(part, logs))
            if in_turn:
                wait_until(part.healthy, children)
        for part in parts:
            wait_until(part.healthy, children)
        ready()
        if restarts:
            _keep_running(parts, children, logs)
        while True:
            require_running(children)
            time.sleep(0.5)
    finally:
        for child in reversed(children):
            say(f"serve: stopping {child.name}")
            child.stop()


def _start(part: Part, logs: Path) -> Child:
    return Child(part.name, part.command, part.environment, logs / f"{part.name}.log")


def _keep_running(parts: list[Part], children: list[Child], logs: Path) -> NoReturn:
    """Restarts each part that ends. Raises `ChildDiedError` if a restarted part ends before it is healthy."""
    starting: set[int] = set()
    while True:
        starting = {i for i in starting if not parts[i].healthy()}
        require_running([children[i] for i in starting])
        for i in [i for i, child in enumerate(children) if child.status is not None]:
            children[i].kill()  # the rest of its group, which may keep its log open
            say(f"serve: {ChildDiedError(children[i])}\nserve: starting {parts[i].name} again")
            children[i] = _start(parts[i], logs)
            starting.add(i)
        time.sleep(0.5)


def port_taken(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something holds `port`, so that a server could not bind it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def free_port(host: str = "127.0.0.1") -> int:
    """A free TCP port that no outgoing connection gets, so that a server can still bind it a minute from now, and again after
    a restart. Never returns a port twice."""
    return next(port for port in _ports if not port_taken(port, host))
