"""What each group of a run should measure, computed before it: recorded answers say what drafts get accepted, the loads on
the same server before it (first of all pilot loads) say how long a step takes, and the rest is arithmetic.

Plain decoding yields one token per request and step. Where the whole budget is verified, tokens per step come from a replay of
the drafts (benchmarks.replay). SSSD chooses rows by what it expects, so its own policy is run on the replayed drafts, with
those step times for a clock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from benchmarks.playback import Playback
from benchmarks.replay.method import Method, replay
from benchmarks.replay.methods import METHODS, OURS, Corpus, Factory
from benchmarks.replay.peers import SglangNgram
from benchmarks.serve.cases import Case, Request
from benchmarks.traces import Trace
from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import NO_DRAFT, Budget, Opening
from sglang_patches.step.length import CANDIDATE_WIDTHS, LengthPolicy

TRIE = 2_000_000  # nodes: more than a run's answers need, and 1.5 GB less than the server's beside it
REPLAYED: dict[str, Factory] = {
    "ngram": lambda corpus, nodes: SglangNgram(nodes, capacity=TRIE),
    "ngram_corpus": lambda corpus, nodes: SglangNgram(nodes, automaton=corpus.documents, capacity=TRIE),
    "sssd_static": METHODS[OURS],
}
WITHOUT_PRIOR = ("sssd_cold", "sssd_static")
RECENT = 4  # loads whose step times count: the pace of a shared machine changes within minutes

Expected = tuple[float, float]  # tokens, and the seconds they take


@dataclass(frozen=True)
class StepTime:
    """t(batch, rows, context): seconds of a step at one batch size by rows of each request, between measurements along a line,
    and beyond them as the line from the first to the last goes on.

    context: mean tokens of a request in the measurements; another_token: seconds that one more adds. admission: seconds that
    a request takes beside its decode steps."""

    rows: Sequence[int]
    seconds: Sequence[float]
    admission: float = 0.0
    context: float = 0.0
    another_token: float = 0.0

    def __call__(self, rows: int, context: float) -> float:
        longer = self.another_token * (context - self.context)
        if rows > self.rows[-1] and len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[0]) / (self.rows[-1] - self.rows[0])
            return longer + self.seconds[-1] + slope * (rows - self.rows[-1])
        return longer + float(np.interp(rows, self.rows, self.seconds))


Expectation = Callable[[Sequence[Trace], StepTime], Expected]


def step_time(load: dict, long_pilot: dict, batch: int, rows: int, another_token: float) -> StepTime:
    """From records of two loads: the cells of both if the server counts them, those of the second shifted to the context of
    the first; else the mean step of the first, of `rows` rows, admission included. More rows never take less, whatever the
    few steps of a width say."""
    if not load["cells"]:
        return StepTime([rows], [mean_step(load, batch)], 0.0, load["context"], another_token)
    cells: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(2))  # steps and seconds by width
    for record in (load, long_pilot):
        shift = another_token * (load["context"] - record["context"])
        for size, width, steps, total in record["cells"]:
            if size == batch:
                cells[width] += (steps, total + steps * shift)
    decoding = sum(total for *_, total in load["cells"])
    admission = max(0.0, load["wall_seconds"] - decoding) / len(load["outputs"])
    return rising(cells, admission, load["context"], another_token)


def rising(cells: Mapping[int, np.ndarray], *more: float) -> StepTime:
    """Mean seconds by width of so many steps and seconds; more rows never take less. more: as of StepTime."""
    from scipy.optimize import isotonic_regression

    widths = sorted(cells)
    counts, totals = np.array([cells[width] for width in widths]).T
    return StepTime(widths, isotonic_regression(totals / counts, weights=counts).x.tolist(), *more)


def mean_step(load: dict, batch: int) -> float:
    """Seconds."""
    return batch * load["decoded"] / load["steps"] * load["seconds"] / load["tokens"]


def token_cost(pilot: dict, long_pilot: dict, batch: int, rows: int) -> float:
    """Seconds that another token of context adds to a step, from loads of shorter and of longer prompts."""

    def times(record: dict) -> dict[int, float]:
        if not record["cells"]:
            return {rows: mean_step(record, batch)}
        return {width: total / steps for size, width, steps, total in record["cells"] if size == batch}

    short, long = times(pilot), times(long_pilot)
    more = [long[width] - short[width] for width in short.keys() & long.keys()]
    tokens = long_pilot["context"] - pilot["context"]
    return max(0.0, float(np.median(more)) / tokens) if more and tokens > 0 else 0.0


def merged(records: Sequence[dict]) -> dict:
    """What step times need of several loads (measure), as if they were one."""
    cells: dict[tuple[int, int], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for record in records:
        for batch, width, *times in record["cells"]:
            cells[batch, width] += times
    whole = ("decoded", "steps", "seconds", "tokens", "wall_seconds")
    return {name: sum(record[name] for record in records) for name in whole} | {
        "cells": [[*cell, *times.tolist()] for cell, times in cells.items()],
        "outputs": [output for record in records for output in record["outputs"]],
        "context": float(np.mean([record["context"] for record in records])),
    }


def traces_of(group: Sequence[Request], max_tokens: int) -> list[Trace]:
    return [
        Trace(request.category, np.array(request.prompt, np.int32), request.output[:max_tokens])
        for request in group
        if request.output is not None
    ]


class Recent:
    """Step times of one server at one batch size, from its newest loads."""

    def __init__(self, pilots: Sequence[dict], long_pilot: dict, batch: int, rows: int) -> None:
        """pilots: records (benchmarks.serve.measure) of ordinary prompts; see `step_time`."""
        self._long_pilot, self._batch, self._rows = long_pilot, batch, rows
        self._another_token = token_cost(merged(pilots), long_pilot, batch, rows)
        self._loads = deque(pilots, maxlen=max(RECENT, len(pilots)))

    def learn(self, record: dict) -> None:
        self._loads.append(record)

    def step_time(self) -> StepTime:
        return step_time(merged(self._loads), self._long_pilot, self._batch, self._rows, self._another_token)


class Forecasts:
    """Each group's, before it is run; what the group measured then tells of the next."""

    def __init__(
        self, recent: dict[tuple[str, int], Recent], nodes: int, corpus: Corpus, max_tokens: int
    ) -> None:
        """recent: by variant and batch size."""
        self._recent, self._max_tokens = recent, max_tokens
        known = {
            variant: Corpus([], vocab_size=corpus.vocab_size) if variant in WITHOUT_PRIOR else corpus
            for variant, _ in recent
        }
        # One for all batch sizes, as on the server.
        replayed = {name: REPLAYED[name](corpus, nodes) for name, corpus in known.items() if name in REPLAYED}
        self._expectations = {
            (name, batch): expectation(name, batch, nodes, known[name], times.step_time(), replayed.get(name))
            for (name, batch), times in recent.items()
        }

    def of(self, variant: str, case: Case, batch: int, group: Sequence[Request]) -> Expected | None:
        """None where recorded answers do not tell."""
        expected = self._expectations[variant, batch]
        traces = traces_of(group, self._max_tokens)
        if expected is None or len(traces) < len(group) or not case.replayable:
            return None
        return expected(traces, self._recent[variant, batch].step_time())

    def learn(self, variant: str, case: Case, batch: int, record: dict) -> None:
        if case.replayable:
            self._recent[variant, batch].learn(record)


def expectation(
    variant: str, batch: int, nodes: int, corpus: Corpus, time: StepTime, replayed: Method | None
) -> Expectation | None:
    """What a variant makes of one group after the other; None for one that cannot be replayed. time: as it starts. replayed: the
    method, where it verifies whole drafts."""
    if variant in ("sssd", "sssd_cold", "sssd_grpc", "sssd_by_request"):
        by_request = variant == "sssd_by_request"
        return Simulation(corpus, batch, nodes, time, by_request=by_request).load_at
    if variant in ("plain", "control_adaptive"):
        return partial(fixed_load, lambda traces: 1.0, batch, 1)
    if variant == "control":
        return partial(fixed_load, lambda traces: 1.0, batch, nodes + 1)
    if replayed is not None:
        return partial(fixed_load, partial(per_step, replayed), batch, nodes + 1)
    return None


def per_step(method: Method, traces: Sequence[Trace]) -> float:
    """Tokens per step."""
    return float(np.mean([step.tokens for trace in traces for step in replay(method, trace)] or [1]))


def fixed_load(
    tokens_per_step: Callable[[Sequence[Trace]], float],
    batch: int,
    rows: int,
    traces: Sequence[Trace],
    time: StepTime,
) -> Expected:
    """Where every step verifies the same rows."""
    tokens = sum(len(trace.output) for trace in traces)
    context = float(np.mean([len(trace.prompt) + len(trace.output) / 2 for trace in traces]))
    return tokens, tokens / (batch * tokens_per_step(traces)) * time(rows, context)


class Simulation:
    """SSSD's worker without a model: the engine drafts, the policy chooses, recorded answers accept, the pilot's times pass.

    linear_seconds: what the policy is told of the linear layers. pace: how much slower than it is each step looks to it.
    by_request: whether each request of a step may have its own number of rows."""

    def __init__(
        self,
        corpus: Corpus,
        batch: int,
        nodes: int,
        time: StepTime,
        linear_seconds: Callable[[float], float] | None = None,
        pace: Callable[[], float] = lambda: 1.0,
        by_request: bool = False,
    ) -> None:
        self._engine, self._budget = Engine(corpus.vocab_size, corpus.segments), Budget(nodes)
        self._batch, self._time, self._pace = batch, time, pace
        widths = [*(width for width in CANDIDATE_WIDTHS if width <= nodes), nodes + 1]
        by_rows = linear_seconds or (lambda rows: time(max(1, round(rows / batch)), time.context))
        self.policy = LengthPolicy(widths, by_rows, by_request=by_request)
        self._names = count()

    def load_at(self, traces: Sequence[Trace], time: StepTime) -> Expected:
        """A load whose steps take another time than those before."""
        self._time = time
        return self.load(traces)

    def load(self, traces: Sequence[Trace]) -> Expected:
        """A steady load (benchmarks.serve.measure), until a place stays empty."""
        waiting = iter(traces)
        places = [self._begin(trace) for trace, _ in zip(waiting, range(self._batch), strict=False)]
        produced, seconds = float(len(places)), self._time.admission * len(places)
        while True:
            for i, place in enumerate(places):
                if not place.ended:
                    continue
                self._engine.step([place.closing()])
                following = next(waiting, None)
                if following is None:
                    return produced, seconds
                places[i] = self._begin(following)
                produced, seconds = produced + 1, seconds + self._time.admission
            gained, took = self._step(places)
            produced, seconds = produced + gained, seconds + took

    def _begin(self, trace: Trace) -> Playback:
        text, size = np.concatenate([trace.prompt, trace.output]), len(trace.prompt)
        return Playback(str(next(self._names)), text, size + 1, Opening(prompt_length=size))

    def _step(self, places: Sequence[Playback]) -> tuple[int, float]:
        policy, batch = self.policy, len(places)
        budget = self._budget if policy.wants_draft(batch) else NO_DRAFT
        trees = [reply.tree for reply in self._engine.step([place.entry(budget) for place in places])]
        widths = policy.choose(trees)
        gained = 0
        for place, tree, width in zip(places, trees, widths.tolist(), strict=True):
            verified = tree.first(width - 1)
            accepted = place.accepted(verified)
            if width > 1:
                policy.acceptance.observe("", [verified], accepted)
            gained += place.advance(int(accepted.sum()) + 1)
        took = self._time(float(widths.mean()), float(np.mean([place.known for place in places])))
        policy.times.observe(batch, int(widths.sum()), took * self._pace())
        return gained, took
