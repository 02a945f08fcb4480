"""Who runs when, by method: a stretch of one request on the virtual clock, once the predictor has learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.pipeline.experiments import Case, Question
from benchmarks.pipeline.methods import PLAIN, partly_known, setting_of
from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import EarlyExit, Pipeline
from sglang_patches.methods.registry import METHODS
from sglang_patches.options import Options

RATIO = 5.0  # C
EXIT = EarlyExit(layer=1, share=0.5, choices=4)
LEARNING = 200  # steps before the stretch
SHOWN = 12  # target forwards of one row that the stretch takes


def timelines(question: Question, case: Case, known: float | None) -> Iterator[dict]:
    """A row for each method. Milliseconds from the begin of the stretch. target: begin, end, kind and tokens of each step; draft: begin
    and end of each forward. known: as of `partly_known`."""
    asked = question.at(RATIO)
    unit = asked.times.target(1)
    steps = [(unit * at, unit * (at + 1), "nothing", 1) for at in range(SHOWN)]
    yield _row(PLAIN, steps, [], SHOWN * unit)
    pairs = [with_exit(pair) for pair in asked.pairs(case, 1)]
    store = asked.datastore or partly_known(pairs, known or 0.0)
    nodes = asked.lookahead
    options = Options("embedded", nodes=nodes, draft_rows=asked.draft_rows, draft_lookahead=nodes)
    for name, method in METHODS.items():
        exit = EXIT if method.early_exit else None
        pipeline = Pipeline(setting_of(name, options, asked.times, store, exit=exit), pairs, batch=1)
        for _ in range(LEARNING):
            pipeline.step()
        begin = pipeline.steps[-1].ended
        end = begin + SHOWN * unit
        while pipeline.steps[-1].ended < end:
            pipeline.step()
        found = pipeline.steps[LEARNING:]
        steps = [
            (step.launched - begin, step.ended - begin, step.kinds[0], step.tokens)
            for step in found
            if step.ended <= end
        ]
        drafted = [(b - begin, min(e, end) - begin) for b, e in pipeline.drafted if begin <= b < end]
        yield _row(name, steps, drafted if method.draft_parts else [], SHOWN * unit)


def with_exit(pair: Pair) -> Pair:
    """The pair with an early exit that is right as often as its draft model."""
    return replace(pair, exits={EXIT.layer: (pair.choices, pair.probabilities)})


def _row(name: str, steps: list, drafted: list, seconds: float) -> dict:
    return {
        "method": name,
        "milliseconds": 1e3 * seconds,
        "tokens": sum(tokens for *_, tokens in steps),
        "target": [[1e3 * begin, 1e3 * end, kind, tokens] for begin, end, kind, tokens in steps],
        "draft": [[1e3 * begin, 1e3 * end] for begin, end in drafted],
    }
