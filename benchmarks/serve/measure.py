"""One group on one server, and the interleaved order of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.report.records import Journal
from benchmarks.serve.cases import Case, Request
from benchmarks.serve.load import steady_load
from benchmarks.serve.prediction import Forecasts
from sglang_patches.metrics import PHASES, RETRIEVE
from tests.support.servers.engine import SglangServer
from tests.support.servers.metrics import samples

STEP = "specstore_decode_step_seconds"
ENGINE_SECONDS = "specstore_engine_seconds_sum"


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
        cells: dict[tuple[int, int], list[float]] = {}
        for sample in samples(server.url):
            if sample.name == "specstore_decode_phase_seconds_total":
                phases[sample.labels["phase"]] = sample.value
            elif sample.name in (f"{STEP}_count", f"{STEP}_sum"):
                cell = int(sample.labels["batch"]), int(sample.labels["width"])
                cells.setdefault(cell, [0.0, 0.0])[sample.name.endswith("_sum")] = sample.value
        served = 0.0
        if service_port is not None:
            url = f"http://127.0.0.1:{service_port}"
            served = sum(sample.value for sample in samples(url) if sample.name == ENGINE_SECONDS)
        return Counters(phases, {cell: (count, total) for cell, (count, total) in cells.items()}, served)

    def since(self, before: Counters) -> Counters:
        zero = (0.0, 0.0)
        return Counters(
            {name: value - before.phases.get(name, 0.0) for name, value in self.phases.items()},
            {
                cell: (new[0] - before.cells.get(cell, zero)[0], new[1] - before.cells.get(cell, zero)[1])
                for cell, new in self.cells.items()
                if new[0] > before.cells.get(cell, zero)[0]
            },
            self.served - before.served,
        )


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
        server.generate_many(prompts, batch, **sampling)
    before = Counters.of(server, service_port)
    load = steady_load(server, prompts, batch, stream_interval=case.chunk, **sampling)
    spent = Counters.of(server, service_port).since(before)
    answers = load.answers
    return {
        "ttft_seconds": waited,
        "seconds": load.seconds,
        "wall_seconds": max(answer.times[-1] for answer in answers)
        - min(answer.times[0] for answer in answers),
        "tokens": load.produced,
        "decoded": sum(len(answer.tokens) - 1 for answer in answers),
        "steps": sum(answer.steps for answer in answers),
        "context": float(
            np.mean([len(r.prompt) + len(a.tokens) / 2 for r, a in zip(group, answers, strict=True)])
        ),
        "gaps": [round(gap, 5) for answer in answers for gap in answer.gaps()],
        "phases": spent.phases,
        "served": spent.served,
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
    service_ports: dict[str, int],
    cases: Sequence[Case],
    forecasts: Forecasts,
    max_tokens: int,
    journal: Journal,
    progress: Callable[[list[Point]], Sequence[Point]],
) -> None:
    """service_ports: of the metrics of a variant's own service. The journal gets a record a point and variant, `expected` being
    (tokens, seconds) as forecast before. The order of the variants rotates from point to point: a slow minute of the machine hits all of them."""
    variants = list(servers)
    for number, point in enumerate(progress(list(points(cases)))):
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
    spent = {
        phase: sum(row["phases"].get(phase, 0.0) for row in rows) / whole for phase in (*PHASES, RETRIEVE)
    }
    served = sum(row["served"] for row in rows) / whole
    retrieval = served or spent[RETRIEVE]
    shares = {
        "forward": spent["forward"],
        "verify": spent["verify"],
        "retrieval": retrieval,
        "transport": spent[RETRIEVE] - retrieval,
        "bookkeeping": spent["draft"] - spent[RETRIEVE] + spent["prepare"] + spent["commit"],
    }
    return shares | {"rest": 1.0 - sum(shares.values())}
