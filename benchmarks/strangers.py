"""`python -m benchmarks.strangers`: what a worker's drafts take while strangers hold the service's ports, and while they do not.

Rounds alternate. Strangers are a process that holds calls whose requests do not come, connections on which nothing is said on both
ports, and a worker that has stopped. With `--noisy` they are workers of another tenant, which step and publish without pause as far as
their tenant's quota permits. A step's time is from making the message to having read the answer.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import grpc
import numpy as np
from tokenizers import Tokenizer

from benchmarks.engine import STEPS
from benchmarks.options import Parser, add_tokenizer
from benchmarks.report.records import finish
from benchmarks.rpc import FINGERPRINT, SECONDS, Recorded, datastore, recorded_batches
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from proto_gen.specstore.v1.admin_pb2 import SetQuotaRequest
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from sglang_patches.launch.processes import free_port

HALF_SENT, IDLE, IDLE_METRICS = 100, 1100, 1005
UNFINISHED = ("/specstore.v1.Admin/Stats", "/grpc.health.v1.Health/Check")
NOISY, NOISE_BATCH, NOISE_TOKENS, NOISE_NODES, NOISE_IDS = "noisy", 64, 256, 16, 1000
SETTLE_SECONDS = 1.0
STOPS = """
import sys
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Namespace
datastore = GrpcDatastore(sys.argv[1], Namespace("stranger", "0" * 64))
sys.exit(0 if datastore.wait_connected(60) and print("connected", flush=True) is None and sys.stdin.read() else 1)
"""


def hold(endpoint: str, metrics_port: int, told: Connection) -> None:
    """The strangers' process: told True they hold the ports, told False they leave them."""
    while told.recv():
        with ExitStack() as held:
            host, port = endpoint.rsplit(":", 1)
            ports = [*[int(port)] * IDLE, *[metrics_port] * IDLE_METRICS]
            ends = [held.enter_context(_idle(at)) for at in ports]
            channel = held.enter_context(grpc.insecure_channel(endpoint))
            never: queue.SimpleQueue = queue.SimpleQueue()
            for number in range(HALF_SENT):
                channel.stream_stream(UNFINISHED[number % len(UNFINISHED)])(iter(never.get, None))
            held.enter_context(_stopped_worker(endpoint))
            told.send(len(ends))
            told.recv()
            for _ in range(HALF_SENT):
                never.put(None)
        told.send(0)


def be_noisy(endpoint: str, workers: int, told: Connection) -> None:
    """The noisy tenant's process: told True its workers begin, told False they end."""
    while told.recv():
        ended = threading.Event()
        with ThreadPoolExecutor(workers) as pool:
            noise = [pool.submit(make_noise, endpoint, number, ended) for number in range(workers)]
            told.send(workers)
            told.recv()
            ended.set()
        told.send(sum(each.result() for each in noise))


def make_noise(endpoint: str, number: int, ended: threading.Event) -> int:
    """Opens, steps and publishes batches of sessions until it is ended. Steps that were answered."""
    worker, rng = (
        GrpcDatastore(endpoint, Namespace("noise", FINGERPRINT, NOISY)),
        np.random.default_rng(number),
    )
    steps = 0
    if not worker.wait_connected(SECONDS):
        raise RuntimeError(f"a worker of the noisy tenant did not connect: {worker.disconnect_reason}")
    while not ended.is_set():
        texts = rng.integers(0, NOISE_IDS, (NOISE_BATCH, NOISE_TOKENS), np.int32)
        names = [f"{number}-{steps}-{row}" for row in range(NOISE_BATCH)]
        opening = zip(names, texts, strict=True)
        worker.step(
            [Entry(name, 0, text, (), Budget(NOISE_NODES), Opening()) for name, text in opening], SECONDS
        )
        worker.step([Entry(name, closing=True) for name in names], SECONDS)
        steps += 2
    worker.close()
    return steps


def _idle(port: int) -> socket.socket:
    """The service may leave it in the kernel's queue, so nobody waits for it."""
    end = socket.socket()
    end.setblocking(False)
    end.connect_ex(("127.0.0.1", port))
    return end


@contextmanager
def _stopped_worker(endpoint: str) -> Iterator[None]:
    words, pipe = [sys.executable, "-c", STOPS, endpoint], subprocess.PIPE
    worker = subprocess.Popen(words, stdin=pipe, stdout=pipe)
    try:
        if worker.stdout is None or worker.stdout.readline() != b"connected\n":
            raise RuntimeError("the worker that is to stop did not connect")
        os.kill(worker.pid, signal.SIGSTOP)
        yield
    finally:
        worker.kill()
        worker.wait()


@contextmanager
def strangers(be: Callable[..., None], *words: object) -> Iterator[Callable[[bool], None]]:
    """What makes them come and go. be: what their process does, which gets the words and a pipe."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=be, args=(*words, theirs), daemon=True)
    process.start()

    def present(wanted: bool) -> None:
        ours.send(wanted)
        ours.recv()

    try:
        yield present
    finally:
        process.kill()
        process.join()


def measure(service: GrpcDatastore, rounds: Sequence[Sequence[Recorded]]) -> np.ndarray:
    """Microseconds of each step."""
    times = []
    for steps in rounds:
        for step in steps:
            started = time.perf_counter()
            if service.step(step.entries, SECONDS) is None:
                raise RuntimeError(f"the service did not answer: {service.disconnect_reason}")
            times.append(1e6 * (time.perf_counter() - started))
        service.step([Entry(entry.session, closing=True) for entry in steps[0].entries], SECONDS)
    return np.array(times)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("strangers", __doc__)
    add_tokenizer(parser)
    parser.add("--batch", 8, "sessions of a step")
    parser.add("--nodes", 8, "drafted for each of them")
    parser.add("--rounds", 20, "with strangers, and as many without")
    parser.add("--texts", 20, f"batches a round, of {STEPS} steps each")
    parser.add("--noisy", 0, "workers of a noisy tenant, in place of the others")
    parser.add("--messages", 0, "a second that its quota permits them together; 0: as many as they can send")
    given = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    batches = recorded_batches(tokenizer, given.batch, given.nodes, given.texts)
    metrics_port, results = free_port(), []
    with (
        datastore("--metrics-port", metrics_port) as (running, connected),
        strangers(be_noisy, running.endpoint, given.noisy)
        if given.noisy
        else strangers(hold, running.endpoint, metrics_port) as present,
    ):
        if given.messages:
            set_quota(running.endpoint, given.messages)
        measure(connected, batches)  # what loads late is loaded
        for number in range(given.rounds):
            times = {}
            for there in (True, False) if number % 2 else (False, True):
                if there:
                    present(True)
                time.sleep(SETTLE_SECONDS)
                times[there] = measure(connected, batches)
                if there:
                    present(False)
            results.append(_row(times[False], times[True]))
    finish("strangers", given, results=results)


def set_quota(endpoint: str, messages_per_second: int) -> None:
    """The noisy tenant's."""
    request = SetQuotaRequest(tenant=NOISY, messages_per_second=messages_per_second)
    with grpc.insecure_channel(endpoint) as channel:
        AdminStub(channel).SetQuota(request, timeout=SECONDS)


def _row(alone: np.ndarray, beside: np.ndarray) -> dict[str, float]:
    return {
        f"{name}_{share}": float(np.percentile(times, share))
        for name, times in (("alone", alone), ("beside", beside))
        for share in (50, 99)
    }


if __name__ == "__main__":
    main()
