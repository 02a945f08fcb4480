"""The processes that hold the simulated engines, a thread each."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.load.engine import Engine, Level, Taken, Texts
from benchmarks.traces import load_traces
from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Namespace

ANSWER_SECONDS = 120.0  # for a process's report after a level, and for all of its sessions to open


@dataclass(frozen=True)
class Plan:
    """What every process needs. batch: sessions of a stream. deadline: seconds."""

    endpoint: str
    namespace: Namespace
    traces: tuple[Path, ...]
    vocab_size: int
    batch: int
    nodes: int
    deadline: float
    seed: int


class ClientError(Exception):
    """A client process is of no more use."""


class Clients:
    """Client processes, each with a share of the streams. Ends them at the end of the `with` block."""

    def __init__(self, plan: Plan, streams: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders: list[Connection] = []
        self._processes = []
        for numbers in shares(streams, processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(plan, numbers, theirs), daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed
            self._orders.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def wait_open(self) -> None:
        """Until all sessions are open. Raises ClientError."""
        for orders in self._orders:
            _receive(orders, ANSWER_SECONDS)

    def run(self, level: Level) -> Taken:
        """What all streams took. Raises ClientError if a process dies or does not report."""
        for orders in self._orders:
            orders.send(level)
        taken = Taken()
        for orders in self._orders:
            taken.add(_receive(orders, level.end - level.start + ANSWER_SECONDS))
        return taken


def shares(streams: int, processes: int) -> list[range]:
    """Each process's streams, as even as they can be; no process without one."""
    ends = [streams * number // processes for number in range(processes + 1)]
    return [range(first, end) for first, end in zip(ends, ends[1:], strict=False) if end > first]


def _receive(orders: Connection, seconds: float) -> Taken:
    try:
        if not orders.poll(seconds):
            raise ClientError(f"a client process has not answered for {seconds:.0f} s")
        received = orders.recv()
    except (EOFError, ConnectionResetError):
        raise ClientError("a client process has died; its traceback is above") from None
    if isinstance(received, str):
        raise ClientError(received)
    return received


def _serve(plan: Plan, numbers: Sequence[int], orders: Connection) -> None:
    traces = load_traces(*plan.traces)
    engines = [
        Engine(
            f"s{number}", GrpcDatastore(plan.endpoint, plan.namespace, vocab_size=plan.vocab_size),
            Texts(traces, plan.vocab_size, (plan.seed, number)), plan.batch, plan.nodes, plan.deadline,
        )
        for number in numbers
    ]  # fmt: skip
    phases = [random.Random(f"{plan.seed} {number}").random() for number in numbers]
    with ThreadPoolExecutor(len(engines)) as pool:
        try:
            list(pool.map(Engine.open, engines))
            gc.freeze()  # a collection of the modules and answers would be taken for the service's latency
            orders.send(Taken())
            while True:
                level = orders.recv()
                taken = Taken()
                for of_one in pool.map(Engine.run, engines, [level] * len(engines), phases):
                    taken.add(of_one)
                orders.send(taken)
        except DatastoreError as error:
            orders.send(str(error))
