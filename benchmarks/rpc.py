"""`python -m benchmarks.rpc`: time of a draft over gRPC, beside a raw echo of the same bytes and the engine alone.

Python sources are replayed as sessions, as benchmarks.engine does. Each step is taken three times in turn: by an engine
in this process, by a service over its Draft stream (`GrpcDatastore`, as SSSD uses it), and as bytes of the same length
both ways by an echo service. Services are processes of their own.
"""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
from tokenizers import Tokenizer

from benchmarks.engine import PROMPT, STEPS, sessions
from benchmarks.options import Parser, add_tokenizer
from benchmarks.report.records import finish
from benchmarks.services import ECHO, add_echo, service
from benchmarks.sources import source_documents
from datastore_service.client import wire
from datastore_service.client.remote import GrpcDatastore
from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import Budget, Entry, Namespace
from datastore_service.server.wire import reply_message
from tests.support.servers.datastore import DatastoreService

SECONDS = 10.0  # that an answer may take
START_SECONDS = 120.0
FINGERPRINT = "0" * 64


@dataclass(frozen=True)
class Recorded:
    """A step's entries and the bytes they and their answer take on the wire."""

    entries: list[Entry]
    request: bytes
    reply_size: int


def record(vocab_size: int, texts: Sequence[np.ndarray], budget: Budget) -> list[Recorded]:
    """STEPS steps of sessions over the texts, all at once: one batch."""
    engine, playing = Engine(vocab_size), sessions(texts)
    steps = []
    for number in range(1, STEPS + 1):
        entries = [session.entry(budget) for session in playing]
        replies = engine.step(entries)
        request = wire.request_message(number, entries).SerializeToString()
        steps.append(Recorded(entries, request, len(reply_message(number, replies).SerializeToString())))
        for session, reply in zip(playing, replies, strict=True):
            session.follow(reply.tree)
    return steps


def recorded_batches(tokenizer: Tokenizer, batch: int, nodes: int, count: int) -> list[list[Recorded]]:
    """So many batches of Python sources that are long enough."""
    documents = source_documents(tokenizer, 4000 * batch * count)
    texts = [text for text in documents if len(text) > PROMPT + STEPS * (nodes + 1)][: batch * count]
    firsts = range(0, len(texts) - batch + 1, batch)
    return [record(tokenizer.get_vocab_size(), texts[at : at + batch], Budget(nodes)) for at in firsts]


@contextmanager
def echo(port: int, steps: Sequence[Recorded]) -> Iterator[Callable[[bytes], bytes]]:
    """A call that has the bytes echoed."""
    outbound: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    outbound.put(json.dumps([step.reply_size for step in steps]).encode())
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(ECHO)(iter(outbound.get, None), wait_for_ready=True)
        next(call)

        def send(message: bytes) -> bytes:
            outbound.put(message)
            return next(call)

        yield send
        outbound.put(None)


def measure(
    engine: Engine, service: GrpcDatastore, send: Callable[[bytes], bytes], steps: Sequence[Recorded]
) -> dict[str, list[float]]:
    """Microseconds of each step by each of the three."""
    times: dict[str, list[float]] = {"engine": [], "service": [], "echo": []}
    calls: dict[str, Callable[[Recorded], object]] = {
        "engine": lambda step: engine.step(step.entries),
        "service": lambda step: service.step(step.entries, SECONDS),
        "echo": lambda step: send(step.request),
    }
    for number, step in enumerate(steps):
        names = list(calls)
        for name in names[number % 3 :] + names[: number % 3]:
            started = time.perf_counter()
            calls[name](step)
            times[name].append(1e6 * (time.perf_counter() - started))
    closing = [Entry(entry.session, closing=True) for entry in steps[0].entries]
    engine.step(closing)
    service.step(closing, SECONDS)
    return times


@contextmanager
def datastore(*flags: object) -> Iterator[tuple[DatastoreService, GrpcDatastore]]:
    """A service, and a client that is connected to it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        DatastoreService(Path(folder) / "log", "--log-level", "warning", *flags) as running,
    ):
        connected = GrpcDatastore(running.endpoint, Namespace("benchmark", FINGERPRINT))
        if not connected.wait_connected(START_SECONDS):
            sys.exit(f"the service did not answer: {connected.disconnect_reason}")
        yield running, connected
        connected.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("rpc", __doc__)
    add_tokenizer(parser)
    parser.add("--batch", 8, "sessions of a step")
    parser.add("--nodes", 8, "drafted for each of them")
    parser.add("--rounds", 20, f"of {STEPS} steps each")
    given = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    rounds = recorded_batches(tokenizer, given.batch, given.nodes, given.rounds)
    engine, results = Engine(tokenizer.get_vocab_size()), []
    with service(add_echo) as echo_port, datastore() as (_, connected):
        for number, steps in enumerate(rounds):
            with echo(echo_port, steps) as send:
                times = measure(engine, connected, send, steps)
            if number:  # the first round loads what loads late
                results.append({name: float(np.median(row)) for name, row in times.items()})
    finish("rpc", given, results=results)


if __name__ == "__main__":
    main()
