"""`python -m benchmarks.sharing`: three services that share their outputs, against one service that has all and three that share nothing.

Recorded answers are replayed as requests, three at a time: each is asked once, and once more at the next service. Then: how long until an
output of one service is drafted at another, and what a step takes at a service that reads such outputs, beside one that does not, in turns.
Last, a service is lost with its disk: how long one takes that starts from its backup and reads what came later from the others' stream.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from benchmarks.options import Parser
from benchmarks.playback import Playback
from benchmarks.report.records import finish
from benchmarks.report.statistics import ratio_of_sums
from benchmarks.rpc import FINGERPRINT, SECONDS, START_SECONDS, record
from benchmarks.strangers import measure
from benchmarks.traces import SHIPPED, SHIPPED_PRIOR, Trace, load_traces
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening
from datastore_service.storage.backup import back_up
from datastore_service.storage.backup_store import BackupStore
from datastore_service.storage.restore import restore
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.share import ShareServer

SERVICES, BATCH, VOCABULARY = 3, 8, 49152
LENGTH, KNOWN = 200, 16  # tokens of a published output, and of those that are asked with
LOST = Namespace("lost", FINGERPRINT)
MESSAGE = 64  # outputs that are published at once
ROOM = 2  # times the published tokens: of a live tier
Clients = Sequence[GrpcDatastore]


def replay(services: Clients, traces: Sequence[Trace], nodes: int, shift: int) -> list[int]:
    """Decode steps of each request. Every third one is asked of the same service. shift: how many services further."""

    def play(service: GrpcDatastore, numbers: range) -> list[tuple[int, int]]:
        return [(number, _steps(service, str(number), traces[number], Budget(nodes))) for number in numbers]

    with ThreadPoolExecutor(SERVICES) as pool:
        parts = [range((i - shift) % SERVICES, len(traces), SERVICES) for i in range(SERVICES)]
        return [steps for _, steps in sorted(sum(pool.map(play, services, parts), []))]


def _steps(service: GrpcDatastore, name: str, trace: Trace, budget: Budget) -> int:
    size, steps = len(trace.prompt), 0
    text = np.concatenate((trace.prompt, trace.output))
    playing = Playback(name, text, size + 1, Opening(prompt_length=size))
    while not playing.ended:
        playing.follow(service.step([playing.entry(budget)], SECONDS)[0].tree)
        steps += 1
    service.step([playing.closing()], SECONDS)
    return steps


def publish(service: GrpcDatastore, *seeds: int) -> np.ndarray:
    """An output for each seed, at once; returns the last."""
    outputs = [np.random.default_rng(seed).integers(0, VOCABULARY, LENGTH, np.int32) for seed in seeds]
    entries = [
        Entry(f"published {seed}", tokens=output, opening=Opening(), closing=True)
        for seed, output in zip(seeds, outputs, strict=True)
    ]
    service.step(entries, SECONDS)
    return outputs[-1]


def seconds_until_drafted(first: GrpcDatastore, second: GrpcDatastore, seed: int) -> float:
    return wait_until_drafted(second, publish(first, seed))


def wait_until_drafted(second: GrpcDatastore, output: np.ndarray) -> float:
    """Seconds until a service drafts the output."""
    began = time.monotonic()
    entry = Entry("asked", 0, output[:KNOWN], (), Budget(4), Opening(publish=False), closing=True)
    while output[KNOWN] not in second.step([entry], SECONDS)[0].tree.tokens:
        time.sleep(0.002)
    return time.monotonic() - began


def turns(
    services: dict[str, GrpcDatastore], traces: Sequence[Trace], publish_one: Callable, count: int
) -> list[dict]:
    """Percentiles of a step's microseconds at each service, in turns. An output is published before each batch of steps."""
    texts = [np.concatenate([trace.output for trace in traces[i::BATCH]]) for i in range(BATCH)]
    batches, rows = [record(VOCABULARY, texts, Budget(8))], []
    for turn in range(count + 1):  # the first loads what loads late
        row = {}
        for name in sorted(services, reverse=turn % 2 > 0):
            publish_one(turn)
            for share, micros in zip(
                (50, 99), np.percentile(measure(services[name], batches), (50, 99)), strict=True
            ):
                row[f"{name}_{share}"] = float(micros)
        rows.append(row)
    return rows[1:]


def _round(kinds: dict[str, Clients], traces: Sequence[Trace], nodes: int) -> dict[str, list[int]]:
    """Steps of each request, by kind and by whether it is asked first or again."""
    return {
        f"{kind} {asked}": replay(services, traces, nodes, shift)
        for kind, services in kinds.items()
        for shift, asked in enumerate(("first", "again"))
    }


def compared(rounds: Sequence[dict[str, list[int]]], tokens: int) -> list[dict]:
    """Tokens per step of each arrangement, and their ratio to those of one service; requests are resampled."""
    steps, rows = {name: np.sum([each[name] for each in rounds], axis=0) for name in rounds[0]}, []
    for name, taken in steps.items():
        services, asked = name.split()
        ratio = ratio_of_sums(steps[f"one {asked}"], taken).as_dict()
        rows.append(
            {"services": services, "asked": asked, "per_step": len(rounds) * tokens / taken.sum()} | ratio
        )
    return rows


def connected(service: DatastoreService, namespace: Namespace) -> GrpcDatastore:
    client = GrpcDatastore(service.endpoint, namespace)
    if not client.wait_connected(START_SECONDS):
        raise RuntimeError(f"a service did not answer: {client.disconnect_reason}")
    return client


def rebuilt(folder: Path, words: Sequence[object], outputs: int, later: int) -> dict:
    """Seconds of a service that starts where there was none: to restore the backup, until it serves, and until it has the last output.

    words: of the services' command lines.
    outputs, later: how many the backup has, and how many came after it.
    """
    data, copy, store = folder / "data", folder / "copy", BackupStore(str(folder / "store"))
    data.mkdir()
    words = (*words, "--live-tokens", ROOM * (outputs + later) * LENGTH)
    with DatastoreService(folder / "other.log", *words) as other:
        with DatastoreService(folder / "lost.log", *words, "--data", data) as lost, ExitStack() as stack:
            client, reader = (stack.enter_context(closing(connected(each, LOST))) for each in (lost, other))
            for first in range(0, outputs, MESSAGE):
                publish(client, *range(first, min(first + MESSAGE, outputs)))
            backup = back_up(data, store)
            for first in range(outputs, outputs + later, MESSAGE):
                last = publish(client, *range(first, min(first + MESSAGE, outputs + later)))
            wait_until_drafted(reader, last)
        times = [time.monotonic()]
        restore(store, backup.backup, copy)
        times.append(time.monotonic())
        with DatastoreService(folder / "new.log", *words, "--data", copy) as new:
            times.append(time.monotonic())
            with closing(connected(new, LOST)) as client:
                wait_until_drafted(client, last)
            times.append(time.monotonic())
    seconds = dict(zip(("restored", "serving", "caught_up"), np.diff(times).tolist(), strict=True))
    return {"outputs": outputs, "later": later, "tokens": LENGTH * (outputs + later)} | seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser("sharing", __doc__)
    parser.add("--rounds", 5, "replays of all requests by each arrangement, in turn")
    parser.add("--requests", 160, "recorded answers")
    parser.add("--nodes", 16, "drafted tokens a tree")
    parser.add("--outputs", 100, f"of {LENGTH} tokens, whose way to another service is timed")
    parser.add("--stored", 40_000, f"outputs of {LENGTH} tokens in the backup of a service that is lost")
    parser.add("--later", 2000, "outputs that came after the backup")
    parser.add("--turns", 40, "of steps at a service that shares and one that does not")
    given = parser.parse_args(argv)
    traces, rounds = load_traces(SHIPPED, SHIPPED_PRIOR)[: given.requests], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = ("--share", stack.enter_context(ShareServer(folder / "server")).url)
        logs = [folder / str(i) for i in range(2 * SERVICES)]
        started = [
            stack.enter_context(DatastoreService(log, *words[: 2 * (log in logs[:SERVICES])])) for log in logs
        ]

        def clients(model: str) -> tuple[Clients, Clients]:
            """Of a namespace that is new: services that share, and others."""
            made = [connected(each, Namespace(model, FINGERPRINT)) for each in started]
            for client in made:
                stack.callback(client.close)
            return made[:SERVICES], made[SERVICES:]

        for number in range(given.rounds):
            shared, apart = clients(f"round {number}")
            one = [clients(f"one in round {number}")[1][0] for _ in range(SERVICES)]
            rounds.append(_round({"shared": shared, "apart": apart, "one": one}, traces, given.nodes))
        (first, second, *_), (alone, *_) = clients("others")
        seconds = [seconds_until_drafted(first, second, seed) for seed in range(given.outputs)]
        steps = turns(
            {"sharing": second, "alone": alone},
            traces,
            lambda turn: publish(first, given.outputs + turn),
            given.turns,
        )
        lost = rebuilt(folder, words, given.stored, given.later)
    tokens = sum(len(trace.output) - 1 for trace in traces)
    finish(
        "sharing",
        given,
        [SHIPPED, SHIPPED_PRIOR],
        drafts=compared(rounds, tokens),
        seconds=[{"seconds": s} for s in seconds],
        steps=steps,
        rebuilt=[lost],
    )


if __name__ == "__main__":
    main()
