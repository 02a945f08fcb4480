"""A process of its own that serves, drains for ever and is told to end."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import eventually

SERVES = """
import sys, threading
from datastore_service.endpoint import parse_endpoint
from datastore_service.server import service as module
from datastore_service.server.engine_factory import engine_factory

module.END_SECONDS = float(sys.argv[1])
service = module.Service(parse_endpoint("127.0.0.1:0"), engine_factory(None, 100))
started, close = service.start, service.namespaces.close

def start():
    print(started(), flush=True)

def close_never():
    print("closing", flush=True)
    threading.Event().wait()

service.start = start
service.namespaces.close = close_never if sys.argv[2] == "stuck" else close
module.serve(service, {}, None)
"""
SECONDS = 60.0  # for what takes a moment


class Served:
    def __init__(self, end_seconds: float, close: str) -> None:
        self.slept = ""
        command = [sys.executable, "-c", SERVES, str(end_seconds), close]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout.readline().startswith("127.0.0.1:")

    def told(self, signal_number: int, thread: int = 0) -> None:
        """thread: that is to receive it, 0 for the one that the kernel chooses."""
        pid = self.popen.pid
        if ctypes.CDLL(None, use_errno=True).tgkill(pid, thread or pid, signal_number):
            raise OSError(ctypes.get_errno(), "tgkill")

    def sleeps(self) -> bool:
        """Whether the main thread sleeps, and has not woken since the last look."""
        status = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/status").read_text()
        (switches,) = re.findall(r"^voluntary.*", status, re.MULTILINE)
        before, self.slept = self.slept, switches if "State:\tS" in status else ""
        return self.slept != "" and self.slept == before

    def other_threads(self) -> list[int]:
        tasks = sorted(int(path.name) for path in Path(f"/proc/{self.popen.pid}/task").iterdir())
        return [task for task in tasks if task != self.popen.pid]


@pytest.fixture
def serve():
    served: list[Served] = []

    def start(end_seconds: float = 600.0, close: str = "stuck") -> Served:
        served.append(Served(end_seconds, close))
        return served[-1]

    yield start
    for each in served:
        each.popen.kill()
        each.popen.communicate()


def test_a_signal_that_another_thread_receives_ends_the_service(serve):
    """The main thread's sleep is not interrupted: as when the signal comes between its last look and its sleep."""
    service = serve(close="as ever")
    eventually(service.sleeps)
    service.told(signal.SIGTERM, service.other_threads()[-1])
    assert service.popen.wait(SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(serve, number):
    service = serve()
    os.kill(service.popen.pid, signal.SIGTERM)
    assert service.popen.stdout.readline() == "closing\n"
    os.kill(service.popen.pid, number)
    assert service.popen.wait(SECONDS) == 128 + number


def test_draining_ends_in_time_whatever_it_waits_for(serve):
    service = serve(end_seconds=8.0)
    os.kill(service.popen.pid, signal.SIGTERM)
    assert service.popen.stdout.readline() == "closing\n"
    assert service.popen.wait(SECONDS) == 1
