"""One group on one server, and the interleaved order of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report.records import Journal
from benchmarks.serve.cases import Case, Request
from benchmarks.serve.prediction import Forecasts
from sglang_patches.metrics import PHASES, RETRIEVE
from tests.support.servers.engine import SglangServer
from tests.support.servers.metrics import samples

# Of the report of sglang.bench_serving.
KEPT = ("output_throughput", "median_ttft_ms", "median_itl_ms", "p99_itl_ms", "completed")
STEP = "specstore_decode_step_seconds"
ENGINE_SECONDS = "specstore_engine_seconds_sum"


@dataclass(frozen=True)
class Answer:
    """times: when the request was sent and each chunk came. counts: tokens known at those times. steps: decode steps the
    answer took."""

    tokens: list[int]
    times: list[float]
    counts: list[int]
    steps: int

    def count_at(self, when: float) -> float:
        return float(np.interp(when, self.times, self.counts, left=0))

    def gaps(self) -> list[float]:
        """Seconds between tokens after the first: a chunk of several tokens counts as so many equal gaps, as
        sglang.bench_serving counts them."""
        return [
            (self.times[i] - self.times[i - 1]) / new
            for i in range(2, len(self.times))
            for new in [self.counts[i] - self.counts[i - 1]]
            for _ in range(new)
        ]


@dataclass(frozen=True)
class Load:
    """seconds: the timed part. produced: tokens in it."""

    answers: list[Answer]
    seconds: float
    produced: float


def steady_load(
    server: SglangServer, prompts: Sequence[Sequence[int]], batch: int, **sampling: object
) -> Load:
    """Sends the next prompt as one answer ends, so that the batch stays full. Answers in the order of the prompts.

    Requests that start together end apart wherever drafts are accepted unevenly, and a batch that drains measures its slowest request.
    So the timed part ends when there is no prompt left to send: until then every place was taken, and what all places have produced
    by then counts. Raises requests.HTTPError."""
    waiting = iter(range(len(prompts)))
    lock = threading.Lock()
    answers: dict[int, Answer] = {}
    ended: list[float] = []

    def keep_place_taken() -> None:
        while True:
            with lock:
                place = next(waiting, None)
                if place is None:
                    ended.append(time.perf_counter())
                    return
            answers[place] = answer(server, prompts[place], sampling)

    started = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        for finished in [pool.submit(keep_place_taken) for _ in range(batch)]:
            finished.result()
    in_order = [answers[place] for place in range(len(prompts))]
    return Load(in_order, min(ended) - started, sum(answer.count_at(min(ended)) for answer in in_order))


def answer(server: SglangServer, prompt: Sequence[int], sampling: dict[str, object]) -> Answer:
    times, counts = [time.perf_counter()], [0]
    last: dict = {}
    for last in server.stream(prompt, **sampling):
        times.append(time.perf_counter())
        counts.append(len(last["output_ids"]))
    return Answer(
        last["output_ids"], times, counts, last["meta_info"].get("spec_verify_ct") or counts[-1] - 1
    )


@dataclass(frozen=True)
class Counters:
    """What an SSSD server counts of its decode steps; empty for other servers. cells: (batch, width) -> (steps, seconds).
    served: seconds that the datastore service spent on drafts, where there is one."""

    phases: dict[str, float]
    cells: dict[tuple[int, int], tuple[float, float]]
    served: float = 0.0

    @staticmethod
    def of(server: SglangServer, service_port: int | None = None) -> Counters:
        """service_port: of the service's metrics."""
        phases: dict[str, float] = {}
        cells: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for sample in samples(server.url):
            if sample.name == "specstore_decode_phase_seconds_total":
                phases[sample.labels["phase"]] = sample.value
            elif sample.name in (f"{STEP}_count", f"{STEP}_sum"):
                cell = int(sample.labels["batch"]), int(sample.labels["width"])
                cells[cell][sample.name.endswith("_sum")] = sample.value
        service = samples(f"http://127.0.0.1:{service_port}") if service_port is not None else ()
        served = sum(sample.value for sample in service if sample.name == ENGINE_SECONDS)
        return Counters(phases, {cell: (count, total) for cell, (count, total) in cells.items()}, served)

    def since(self, before: Counters) -> Counters:
        cells = {}
        for cell, (count, total) in self.cells.items():
            first_count, first_total = before.cells.get(cell, (0.0, 0.0))
            if count > first_count:
                cells[cell] = (count - first_count, total - first_total)
        phases = {name: value - before.phases.get(name, 0.0) for name, value in self.phases.items()}
        return Counters(phases, cells, self.served - before.served)


def first_tokens(server: SglangServer, group: Sequence[Request], batch: int) -> list[float]:
    """Prefills the prompts, `batch` at a time; seconds to the first token of each."""

    def one(request: Request) -> float:
        started = time.perf_counter()
        server.generate(request.prompt, temperature=0, max_new_tokens=1)
        return time.perf_counter() - started

    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(one, group))


def measure(
    server: SglangServer,
    group: Sequence[Request],
    batch: int,
    max_tokens: int,
    case: Case,
    service_port: int | None = None,
) -> dict:
    """Prefill (where the case says so a first complete answer), then the timed decoding from the cached prefix.

    Times are in seconds. tokens: produced in the timed part, `seconds`; decoded, steps: of all answers, to the end at
    `wall_seconds`. context: mean tokens of a request. gaps: between tokens. service_port, phases, cells, served: see
    Counters, cells as [batch, width, steps, seconds]. Raises requests.HTTPError."""
    sampling = case.sampling | {"max_new_tokens": max_tokens}
    prompts = [request.prompt for request in group]
    waited = first_tokens(server, group, batch)
    if case.seen:
        server.generate_many(prompts[:: case.seen], batch, **sampling)
    before = Counters.of(server, service_port)
    load = steady_load(server, prompts, batch, stream_interval=case.chunk, **sampling)
    spent = Counters.of(server, service_port).since(before)
    answers = load.answers
    begun, ended = (min(a.times[0] for a in answers), max(a.times[-1] for a in answers))
    contexts = [len(r.prompt) + len(a.tokens) / 2 for r, a in zip(group, answers, strict=True)]
    return {
        "ttft_seconds": waited, "seconds": load.seconds, "wall_seconds": ended - begun, "tokens": load.produced,
        "decoded": sum(len(a.tokens) - 1 for a in answers), "steps": sum(a.steps for a in answers),
        "context": float(np.mean(contexts)), "gaps": [round(gap, 5) for a in answers for gap in a.gaps()],
        "phases": spent.phases, "served": spent.served, "cells": [[*cell, *times] for cell, times in spent.cells.items()],
        "outputs": [a.tokens for a in answers],
    }  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A group in its place of the run."""

    case: Case
    batch: int
    index: int
    group: list[Request]


def points(cases: Sequence[Case]) -> Iterator[Point]:
    for case in cases:
        for batch, groups in case.groups.items():
            for index, group in enumerate(groups):
                yield Point(case, batch, index, group)


def run(
    servers: dict[str, SglangServer],
    service_ports: dict[str, int],
    asked: Iterable[Point],
    forecasts: Forecasts,
    max_tokens: int,
    journal: Journal,
) -> None:
    """Measures every point on every server. service_ports: of the metrics of a variant's own service. The journal gets a record a point and variant, `expected` being
    (tokens, seconds) as forecast before. The order of the variants rotates from point to point: a slow minute of the machine hits
    all of them."""
    variants = list(servers)
    for number, point in enumerate(asked):
        turn = number % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            record = {
                "case": point.case.name, "batch": point.batch, "group": point.index, "variant": variant,
                "category": point.group[0].category if point.case.name == "tasks" else point.case.name,
            }  # fmt: skip
            record["expected"] = forecasts.of(variant, point.case, point.batch, point.group)
            port = service_ports.get(variant)
            record |= measure(servers[variant], point.group, point.batch, max_tokens, point.case, port)
            forecasts.learn(variant, point.case, point.batch, record)
            journal.add("group", record)


def breakdown(rows: Sequence[dict]) -> dict[str, float]:
    """Shares of the time that requests are decoded, as Double's table 10; rows: of one SSSD variant and batch size.

    retrieval: the datastore's own time. transport: the rest of the wait for drafts, where the datastore is a service.
    bookkeeping: the worker's, before and after. rest: prefills of cached prompts, the scheduler, requests on their way
    in and out."""
    if not rows[0]["phases"]:
        return {}
    whole = sum(row["wall_seconds"] for row in rows)
    phases = (*PHASES, RETRIEVE)
    spent = {phase: sum(row["phases"].get(phase, 0.0) for row in rows) / whole for phase in phases}
    served = sum(row["served"] for row in rows) / whole
    retrieval = served or spent[RETRIEVE]
    shares = {
        "forward": spent["forward"], "verify": spent["verify"], "retrieval": retrieval,
        "transport": spent[RETRIEVE] - retrieval,
        "bookkeeping": spent["draft"] - spent[RETRIEVE] + spent["prepare"] + spent["commit"],
    }  # fmt: skip
    return shares | {"rest": 1.0 - sum(shares.values())}


def bench_serving(
    server: SglangServer, requests: Sequence[Request], tokenizer, batch: int, max_tokens: int, folder: Path
) -> dict[str, float]:
    """The same load by SGLang's own generator: whether the figures of our steady load are what others would measure. It starts all
    requests at once, ends with the slowest, prefills within the timed part and streams every token, so its ratios lie nearer to one
    than those of a full batch's decoding. KEPT of its report. Raises subprocess.CalledProcessError with its output as `stderr`."""
    prompts, report = folder / "bench-serving.jsonl", folder / "bench-serving-report.jsonl"
    # Rendered chats: its own --apply-chat-template takes out a beginning-of-text token that some templates use for turns.
    turns = ([{"content": tokenizer.decode(request.prompt)}, {"content": "none"}] for request in requests)
    prompts.write_text("".join(json.dumps({"conversations": pair}) + "\n" for pair in turns))
    report.unlink(missing_ok=True)
    options = {
        "backend": "sglang", "host": "127.0.0.1", "port": server.port, "model": server.spec.model,
        "dataset-name": "custom", "dataset-path": prompts, "num-prompts": len(requests),
        "sharegpt-output-len": max_tokens, "max-concurrency": batch, "output-file": report, "warmup-requests": 0,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sglang.bench_serving", *words, "--disable-tqdm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(report.read_text().splitlines()[-1])
    return {name: measured[name] for name in KEPT}
