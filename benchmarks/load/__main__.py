"""`python -m benchmarks.load`: what one datastore service carries, from simulated engines that step thousands of sessions.

A real service with a prior. Client processes hold a Draft stream for each simulated engine; a step is one message for all its
sessions, which say recorded answers and accept of each draft what the answer goes on with. Steps are offered at a rate, for some
minutes. `--find-limit` raises the rate until the 99th percentile of the latency is above a bound, and says which resource was at
its end. A step's latency is what the engine waits: from making the message to having read the answer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.engine import MILLION
from benchmarks.load.clients import ClientError, Clients, Plan
from benchmarks.load.engine import Level
from benchmarks.load.levels import exhausted, figures, search, thinned
from benchmarks.load.watch import Watch
from benchmarks.options import Parser, add_tokenizer
from benchmarks.report.records import finish
from benchmarks.sources import source_documents
from benchmarks.traces import SHIPPED, SHIPPED_PRIOR, load_traces, recorded_rows
from datastore_service.client import tokenizer_fingerprint
from datastore_service.protocol.types import Namespace
from datastore_service.server.limits import ServiceLimits
from datastore_service.storage.build import build_prior, vocabulary_size
from datastore_service.storage.errors import StorageError
from sglang_patches.launch.processes import free_port
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.engine import exit_when_terminated
from tests.support.servers.metrics import samples

LEAD_SECONDS = 1.0  # until a level begins, for all processes to hear of it
SETTLE_SECONDS = 5.0  # at the first rate, before anything is measured
SAMPLES = 120  # that the record keeps
MOST_BATCH = (
    ServiceLimits().entries // 2
)  # sessions of a stream: as many may close in the message in which others open


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("load", __doc__)
    add_tokenizer(parser)
    add = parser.add
    add("--minutes", 10.0, "of the steady load")
    add("--rate", 10.0, "steps per second that each stream is offered")
    add("--streams", 64, "engines")
    add("--sessions", 4096, "of all streams, which have equally many")
    add("--processes", 4, "that hold the streams")
    add("--nodes", 4, "drafted for each session in a step")
    add("--deadline-ms", 5.0, "after which an answer is not used")
    add("--millions", 8.0, "million tokens of the prior")
    add("--traces", [SHIPPED], "files of python -m benchmarks.record")
    add("--seed", 0, "of what the sessions say")
    add("--find-limit", False, "raise the rate from --rate on until --p99-ms is passed")
    add("--p99-ms", 10.0, "bound of the 99th percentile")
    add("--level-seconds", 20.0, "of each rate with --find-limit")
    given = parser.parse_args(argv)
    if given.sessions % given.streams:
        parser.error(f"--sessions: {given.sessions} is not a multiple of the {given.streams} streams")
    if given.sessions // given.streams > MOST_BATCH:
        parser.error(f"--sessions: {given.sessions // given.streams} of a stream exceed {MOST_BATCH}")
    for path in given.traces:
        if not path.is_file():
            parser.error(f"--traces: {path}: no such file")
    return given


def make_prior(folder: Path, tokenizer: Path, tokens: int) -> Path:
    """Of the shipped answers to other prompts, and of Python sources to the size that is wanted."""
    documents = [row["tokens"] for row in recorded_rows(SHIPPED_PRIOR)]
    rest = tokens - sum(map(len, documents))
    if rest > 0:
        sources = source_documents(Tokenizer.from_file(str(tokenizer)), rest)
        documents += [document.tolist() for document in sources]
    corpus = folder / "corpus.jsonl"
    with corpus.open("w") as file:
        file.writelines(json.dumps({"tokens": document}) + "\n" for document in documents)
    build_prior([corpus], folder / "prior", tokenizer, field="tokens")
    corpus.unlink()
    return folder / "prior"


class Bench:
    """A service under a load that can be measured at one rate after the other."""

    def __init__(
        self, given: argparse.Namespace, service: DatastoreService, clients: Clients, url: str, data: Path
    ) -> None:
        self._given, self._service, self._clients, self._url, self._data = given, service, clients, url, data
        self.samples: list[dict] = []

    def run(self, rate: float, seconds: float) -> dict:
        """The level's figures. Its samples are in `samples` then."""
        begin = time.monotonic() + LEAD_SECONDS
        time.sleep(LEAD_SECONDS / 2)
        before = self._counters()
        with Watch(self._service, self._clients.pids, self._data) as watch:
            taken = self._clients.run(Level(rate, begin, begin + seconds))
        self.samples = watch.samples
        first, last = watch.samples[0], watch.samples[-1]
        return {
            **figures(taken, rate, self._given.streams, seconds), **watch.cores, **_of_service(before, self._counters()),
            "rebuilds": last["segments_written"] - first["segments_written"], "sessions": last["sessions"],
            "resident_first": first["resident_bytes"], "resident_last": last["resident_bytes"],
            "resident_most": max(sample["resident_bytes"] for sample in watch.samples),
        }  # fmt: skip

    def _counters(self) -> dict[str, float]:
        """The service's own."""
        wanted = ("specstore_step_seconds", "specstore_engine_seconds", "specstore_refusals")
        counters: dict[str, float] = {}
        for sample in samples(self._url):
            if sample.name.startswith(wanted) and not sample.name.endswith(("_bucket", "_created")):
                counters[sample.name] = counters.get(sample.name, 0.0) + sample.value
        return counters


def _of_service(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Milliseconds a message by the service's own measure, and refused calls."""
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    messages = max(1.0, gained["specstore_step_seconds_count"])
    return {
        "service_ms": 1e3 * gained["specstore_step_seconds_sum"] / messages,
        "service_engine_ms": 1e3 * gained["specstore_engine_seconds_sum"] / messages,
        "refused_calls": gained.get("specstore_refusals_total", 0.0),
    }


@contextmanager
def bench(given: argparse.Namespace) -> Iterator[Bench]:
    """Everything started and all sessions open. Raises StorageError for a file that is no tokenizer, ValueError for answers of
    another vocabulary, ClientError if the sessions cannot be opened."""
    errors = Console(stderr=True)
    vocab_size = vocabulary_size(given.tokenizer)
    check_vocabulary(given.traces, vocab_size)
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder, port = Path(name), free_port()
        errors.print("building the prior")
        prior = make_prior(folder, given.tokenizer, int(given.millions * MILLION))
        data = folder / "data"
        data.mkdir()
        flags = (
            "--prior", prior, "--data", data, "--metrics-port", port, "--vocab-size", vocab_size, "--streams", given.streams,
            "--sessions", 2 * given.sessions, "--log-level", "warning",
        )  # fmt: skip
        with (
            DatastoreService(folder / "log", *flags) as service,
            Clients(plan(given, service.endpoint, vocab_size), given.streams, given.processes) as clients,
        ):
            errors.print(f"opening {given.sessions} sessions")
            clients.wait_open()
            yield Bench(given, service, clients, f"http://127.0.0.1:{port}", data)


def check_vocabulary(paths: Sequence[Path], vocab_size: int) -> None:
    largest = max(int(max(trace.prompt.max(), trace.output.max())) for trace in load_traces(*paths))
    if largest >= vocab_size:
        raise ValueError(f"traces: id {largest} is not below the tokenizer's {vocab_size}")


def plan(given: argparse.Namespace, endpoint: str, vocab_size: int) -> Plan:
    return Plan(
        endpoint,
        Namespace("load", tokenizer_fingerprint(given.tokenizer)),
        tuple(given.traces),
        vocab_size,
        given.sessions // given.streams,
        given.nodes,
        given.deadline_ms / 1e3,
        given.seed,
    )


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    exit_when_terminated()
    try:
        with bench(given) as running:
            running.run(given.rate, SETTLE_SECONDS)
            results = find_limit(given, running) if given.find_limit else carry(given, running)
    except (ValueError, StorageError, ClientError) as error:
        sys.exit(f"load: {error}")
    finish("load", given, [*given.traces, SHIPPED_PRIOR], **results)


def carry(given: argparse.Namespace, running: Bench) -> dict:
    level = running.run(given.rate, 60 * given.minutes)
    return {"levels": [level], "limit": {}, "samples": thinned(running.samples, SAMPLES)}


def find_limit(given: argparse.Namespace, running: Bench) -> dict:
    levels, beyond = search(lambda rate: running.run(rate, given.level_seconds), given.rate, given.p99_ms)
    limit = {"beyond": beyond, "exhausted": exhausted(levels[-1], given.processes) if beyond else ""}
    return {"levels": levels, "limit": limit, "samples": []}


if __name__ == "__main__":
    main()
