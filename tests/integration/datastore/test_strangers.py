"""Whoever opens connections and says nothing, or stops: the workers of a real service, its files and its end are as without them."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.request import urlopen

import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Entry, Namespace, Opening, Status
from sglang_patches.launch.processes import free_port
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.pausing import pause
from tests.waiting import eventually

FILES = 256  # a service may open, so many strangers are more than it has descriptors for
SECONDS = 60.0
ENDED_SECONDS = 10
WORKER = Namespace("m", "0" * 64)


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """TCP connections on which nothing is said. The kernel accepts them, whatever the service does."""
    ends = []
    try:
        for _ in range(count):
            end = socket.socket()
            end.setblocking(False)
            end.connect_ex(("127.0.0.1", port))
            ends.append(end)
        yield ends
    finally:
        for end in ends:
            end.close()


def closed(end: socket.socket) -> bool:
    """By the service, after whatever it has said."""
    try:
        while end.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@contextlib.contextmanager
def limited(tmp_path, *flags: object) -> Iterator[DatastoreService]:
    """A service that may open so few files, as one in a container may."""
    service = DatastoreService(tmp_path / "log", "--data", tmp_path / "data", *flags)
    service._command = ["prlimit", f"--nofile={FILES}:{FILES}", *service._command]
    with service:
        yield service


@contextlib.contextmanager
def worker(endpoint: str) -> Iterator[GrpcDatastore]:
    datastore = GrpcDatastore(endpoint, WORKER)
    try:
        assert datastore.wait_connected(SECONDS), datastore.disconnect_reason
        yield datastore
    finally:
        datastore.close()


def step(datastore: GrpcDatastore, entry: Entry) -> Status:
    replies = datastore.step([entry], SECONDS)
    assert replies is not None
    return replies[0].status


def test_idle_connections_leave_descriptors_for_files(tmp_path):
    port = free_port()
    with limited(tmp_path, "--metrics-port", port) as service, worker(service.endpoint) as first:
        text = np.arange(500) % 97
        assert step(first, Entry("s", 0, text, opening=Opening())) is Status.OK
        with idle_connections(service.port, 1100), idle_connections(port, 1005):
            eventually(lambda: len(os.listdir(f"/proc/{service.pid}/fd")) > FILES // 2)
            for name in ("a", "b"):
                assert step(first, Entry(name, 0, text, opening=Opening())) is Status.OK
            assert step(first, Entry("s", closing=True)) is Status.OK
            assert len(os.listdir(f"/proc/{service.pid}/fd")) < FILES
        eventually(
            lambda: (
                b"specstore_streams 1.0"
                in urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS).read()
            )
        )
        eventually(
            lambda: sum(tier.tokens for space in service.stats().namespaces for tier in space.tiers) >= 500
        )
        service.signal(signal.SIGTERM)
        assert service.wait(SECONDS) == 0


@pytest.mark.parametrize("port", ["gRPC", "metrics"])
def test_a_connection_on_which_nothing_is_said_is_closed(tmp_path, port):
    metrics = free_port()
    with (
        DatastoreService(tmp_path / "log", "--metrics-port", metrics) as service,
        idle_connections(service.port if port == "gRPC" else metrics, 3) as ends,
    ):
        eventually(lambda: all(closed(end) for end in ends))


STOPS = """
import sys, numpy as np
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Namespace
datastore = GrpcDatastore(sys.argv[1], Namespace("m", "0" * 64))
assert datastore.wait_connected(60)
print("connected", flush=True)
sys.stdin.read()
"""


def test_the_stream_of_a_stopped_worker_ends_in_ten_seconds(tmp_path):
    """Beside it another worker, whose stream the service keeps though it says nothing either."""
    with DatastoreService(tmp_path / "log") as service, worker(service.endpoint) as other:
        stopped = subprocess.Popen(
            [sys.executable, "-c", STOPS, service.endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert stopped.stdout.readline() == b"connected\n"
            eventually(lambda: service.stats().streams == 2)
            pause(stopped.pid)
            # Every tenth of a second; fewer where the machine is busy, as the service is too.
            looks = itertools.count()
            while service.stats().streams == 2:
                assert next(looks) < 10 * ENDED_SECONDS
                time.sleep(0.1)
            assert step(other, Entry("s", 0, np.arange(9), opening=Opening())) is Status.OK
        finally:
            stopped.kill()
            stopped.wait()
