"""One group on one server, and the interleaved order of all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve.cases import Case, Request
from benchmarks.serve.load import steady_load
from benchmarks.servers import SglangServer
from sglang_patches.workers.metrics import PHASES

STEP = "specstore_decode_step_seconds"


@dataclass(frozen=True)
class Counters:
    """What an SSSD server counts of its decode steps; empty for other servers. cells: (batch, width) -> (steps, seconds)."""

    phases: dict[str, float]
    waited: float  # seconds for drafts, part of the phase "draft"
    cells: dict[tuple[int, int], tuple[float, float]]

    @staticmethod
    def of(server: SglangServer) -> Counters:
        phases: dict[str, float] = {}
        cells: dict[tuple[int, int], list[float]] = {}
        waited = 0.0
        text = requests.get(server.url + "/metrics", timeout=60).text
        for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
            if sample.name == "specstore_decode_phase_seconds_total":
                phases[sample.labels["phase"]] = sample.value
            elif sample.name == "specstore_client_step_seconds_sum":
                waited = sample.value
            elif sample.name in (f"{STEP}_count", f"{STEP}_sum"):
                cell = int(sample.labels["batch"]), int(sample.labels["width"])
                cells.setdefault(cell, [0.0, 0.0])[sample.name.endswith("_sum")] = sample.value
        return Counters(phases, waited, {cell: (count, total) for cell, (count, total) in cells.items()})

    def since(self, before: Counters) -> Counters:
        zero = (0.0, 0.0)
        return Counters(
            {name: value - before.phases.get(name, 0.0) for name, value in self.phases.items()},
            self.waited - before.waited,
            {
                cell: (new[0] - before.cells.get(cell, zero)[0], new[1] - before.cells.get(cell, zero)[1])
                for cell, new in self.cells.items()
                if new[0] > before.cells.get(cell, zero)[0]
            },
        )


def first_tokens(server: SglangServer, group: Sequence[Request], batch: int) -> list[float]:
    """Prefills the prompts, `batch` at a time; seconds to the first token of each."""

    def one(request: Request) -> float:
        started = time.perf_counter()
        server.generate(request.prompt, temperature=0, max_new_tokens=1)
        return time.perf_counter() - started

    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(one, group))


def measure(server: SglangServer, group: Sequence[Request], batch: int, max_tokens: int, case: Case) -> dict:
    """Prefill (where the case says so a first complete answer), then the timed decoding from the cached prefix."""
    sampling = case.sampling | {"max_new_tokens": max_tokens}
    prompts = [request.prompt for request in group]
    waited = first_tokens(server, group, batch)
    if case.seen:
        server.generate_many(prompts, batch, **sampling)
    before = Counters.of(server)
    load = steady_load(server, prompts, batch, stream_interval=case.chunk, **sampling)
    spent = Counters.of(server).since(before)
    answers = load.answers
    return {
        "ttft_seconds": waited,
        "seconds": load.seconds,
        "wall_seconds": max(answer.times[-1] for answer in answers)
        - min(answer.times[0] for answer in answers),
        "tokens": load.produced,
        "decoded": sum(len(answer.tokens) - 1 for answer in answers),
        "steps": sum(answer.steps for answer in answers),
        "gaps": [round(gap, 5) for answer in answers for gap in answer.gaps()],
        "phases": spent.phases,
        "draft_wait": spent.waited,
        "cells": [[*cell, *times] for cell, times in spent.cells.items()],
        "outputs": [answer.tokens for answer in answers],
    }


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
    cases: Sequence[Case],
    max_tokens: int,
    journal: Path,
    progress: Callable[[list[Point]], Sequence[Point]],
) -> list[dict]:
    """One record a point and arm, each appended to the journal at once, so that a broken run keeps what it has. The order
    of the arms rotates from point to point: a slow minute of the machine hits all of them."""
    records, arms = [], list(servers)
    for number, point in enumerate(progress(list(points(cases)))):
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            record = {
                "case": point.case.name, "batch": point.batch, "group": point.index, "arm": arm,
                "category": point.group[0].category if point.case.name == "tasks" else point.case.name,
            }  # fmt: skip
            record |= measure(servers[arm], point.group, point.batch, max_tokens, point.case)
            records.append(record)
            with journal.open("a") as file:
                file.write(json.dumps(record) + "\n")
    return records


def breakdown(rows: Sequence[dict]) -> dict[str, float]:
    """Shares of the time that requests are decoded, as Double's table 10; rows: of one SSSD arm and batch size.

    retrieval: waiting for drafts, with a service its transport too. rest: prefills of cached prompts, the scheduler, requests
    on their way in and out."""
    if not rows[0]["phases"]:
        return {}
    whole = sum(row["wall_seconds"] for row in rows)
    spent = {phase: sum(row["phases"].get(phase, 0.0) for row in rows) / whole for phase in PHASES}
    retrieval = sum(row["draft_wait"] for row in rows) / whole
    shares = {
        "forward": spent["forward"],
        "verify": spent["verify"],
        "retrieval": retrieval,
        "bookkeeping": spent["draft"] - retrieval + spent["prepare"] + spent["commit"],
    }
    return shares | {"rest": 1.0 - sum(shares.values())}
