"""The experiments of `python -m benchmarks.pipeline` in one table, and what its options make of them: models, times, datastores."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from benchmarks.pipeline import drafts, experiments, methods, timelines
from benchmarks.pipeline.experiments import Case, Question, break_even
from benchmarks.pipeline.pairs import Pair, load, synthetic_pairs
from benchmarks.pipeline.simulation import Times
from benchmarks.pipeline.tables import CEILING, EXITS, METHODS, SHAPES, STORES, TIMELINES
from benchmarks.serve.prediction import StepTime
from benchmarks.traces import load_traces
from datastore_service.client import Datastore
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.types import Entry, Opening

MIXED, REPEATED, PARTLY = "mixed", "repeated", "partly known"  # loads
REFUSALS = 1 << 14  # kept of a session, more than it has
GROUPS = 20  # synthetic pairs: intervals are over them
Found = tuple[
    list[Case], Callable[[Case, int], list[Pair]]
]  # the models to ask for, and what gives pairs of them


def forward_time(points: Sequence[str]) -> StepTime:
    """Seconds by rows, of points ROWS:MILLISECONDS."""
    rows, milliseconds = zip(
        *sorted((int(r), float(ms)) for r, ms in (p.split(":") for p in points)), strict=True
    )
    return partial(StepTime(rows, [ms / 1e3 for ms in milliseconds]), context=0.0)


def synthetic_cases(given: argparse.Namespace) -> Found:
    @lru_cache
    def make(acceptance: float, count: int) -> list[Pair]:
        length = given.tokens // count + given.lookahead + 1
        return synthetic_pairs(count, length, acceptance, given.exponent, given.second, seed=0)

    cases = [{"acceptance": acceptance} for acceptance in given.acceptance]
    return cases, lambda case, batch: make(case["acceptance"], max(GROUPS, 2 * batch))


def recorded_cases(given: argparse.Namespace) -> Found:
    """Pairs of each file, in a random order that does not depend on the file."""
    cases, found = [], {}
    for path in given.pairs:
        pairs, case = load(path)
        pairs = [pair for pair in pairs if len(pair) > given.lookahead + 1]
        random.Random(0).shuffle(pairs)
        cases.append(case)
        found[tuple(case.values())] = pairs
    return cases, lambda case, batch: found[tuple(case.values())]


def recorded_datastore(
    vocab_size: int, prior: Sequence[Path], served: Sequence[Pair] = (), limits: Limits | None = None
) -> Callable[[], Datastore]:
    """Makes datastores with a prior, which have served some answers."""
    answers = [trace.output for trace in load_traces(*prior)]
    segments = [build_segment(answers, vocab_size)] if answers else []
    texts = (
        (np.append(pair.prompt, pair.tokens), Opening(prompt_length=len(pair.prompt))) for pair in served
    )
    entries = [
        Entry(f"served/{at}", tokens=text, opening=opening, closing=True)
        for at, (text, opening) in enumerate(texts)
    ]

    def make() -> Datastore:
        datastore = EmbeddedDatastore(lambda: Engine(vocab_size, segments, limits=limits))
        datastore.post(entries)
        return datastore

    return make


class Asked:
    """What the options ask: question, of which models (cases; the middle one where one is enough), at which batch sizes (the first
    where one is enough) and speed ratios. files: that were read."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._recorded = bool(given.pairs)
        self.cases, pairs = (recorded_cases if self._recorded else synthetic_cases)(given)
        self._store = partial(recorded_datastore, given.vocab_size)
        times = Times(forward_time(given.target), forward_time(given.draft), given.delay_ms / 1e3)
        datastore = self._store(given.prior) if self._recorded else None
        self.question = Question(times, given.lookahead, given.draft_rows, given.e_miss, pairs, datastore)
        self.middle, self.batch = self.cases[len(self.cases) // 2], given.batch[0]
        self.batches, self.speeds, self.known = (
            given.batch,
            given.speed,
            None if self._recorded else given.known,
        )
        self._prior, self._other = given.prior, given.other_prior
        priors = [*given.prior, *(given.other_prior if STORES in given.ask else [])]
        self.files = [*given.pairs, *(priors if self._recorded else [])]

    def fallbacks(self) -> dict:
        cases = self.cases if self._recorded else [self.middle]
        rows = experiments.fallbacks(self.question, cases, self.batches)
        names = ("none", "datastore")
        return {
            "rows": rows,
            "critical": {n: experiments.critical(self.question, self.middle, n) for n in names},
        }

    def ratios(self) -> dict:
        rows = list(experiments.ratios(self.question, self.middle, self.batches, self.speeds))
        of_batch = {batch: [row for row in rows if row["batch"] == batch] for batch in self.batches}
        return {
            "rows": rows,
            "break_even": {b: break_even(of, "over_datastore") for b, of in of_batch.items()},
        }

    def stored(self, case: Case) -> dict[str, Callable[[], Datastore]]:
        """What makes each datastore of `methods.COMPARED`."""
        make, prior = self._store, self._prior
        return {
            methods.NOTHING: make([]),
            methods.OTHER: make(self._other),
            methods.PRIOR: make(prior),
            methods.REFUSED: make(prior, limits=Limits(refusals=REFUSALS)),
            methods.AGAIN: make(prior, self.question.pairs(case, self.batch)),
        }

    def loads(self, case: Case, batch: int) -> dict[str, Callable[[], Datastore]]:
        """What makes the datastore of each load."""
        pairs = self.question.pairs(case, batch)
        if self.known is not None:
            return {PARTLY: methods.partly_known(pairs, self.known)}
        load = str(case.get("load", MIXED))
        made = {load: self._store(self._prior)}
        return made | ({REPEATED: self._store(self._prior, pairs)} if load == MIXED else {})

    def exits(self) -> dict:
        layers, at = int(self.middle["layers"]), (self.batch, self.speeds)
        return {
            "choices": list(drafts.by_choices(self.question, self.cases, *at, layers)),
            "bounds": list(drafts.bounds(self.question, self.cases, *at, layers)),
            "windows": list(drafts.by_window(self.question, self.middle, *at, layers)),
        }


# By the names and in the order of `benchmarks.pipeline.tables.SECTIONS`, which says whose figures they are; None: not of these pairs.
EXPERIMENTS: dict[str, Callable[[Asked], object]] = {
    "forecast": lambda a: experiments.forecast(a.question, a.cases, a.batches),
    "misses": lambda a: experiments.misses(a.question, a.middle),
    "spreads": lambda a: experiments.spreads(a.question, a.cases, a.batch),
    "fallbacks": Asked.fallbacks,
    "ratios": Asked.ratios,
    CEILING: lambda a: {
        "rows": list(methods.ceiling(a.question, a.cases, a.batch, a.known)),
        "known": a.known,
    },
    STORES: lambda a: list(methods.datastores(a.question, a.cases, a.batch, a.stored)),
    METHODS: lambda a: list(methods.contest(a.question, a.cases, a.batches, a.speeds, a.loads)),
    EXITS: Asked.exits,
    SHAPES: lambda a: list(drafts.against_shapes(a.question, a.cases, a.batch, a.speeds)),
    TIMELINES: lambda a: list(timelines.timelines(a.question, a.middle, a.known)),
}
