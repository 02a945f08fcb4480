"""`python -m benchmarks.length`: loss of throughput because the policy has to learn step times.

The policy of SSSD's worker runs on replayed drafts (benchmarks.serve.prediction) against a clock that is made up: its step
times are those given, and its pace wanders and jumps as that of a shared machine. No model, no server, a minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.options import options
from benchmarks.prompts import ALL
from benchmarks.replay.experiments import picks
from benchmarks.replay.methods import Corpus
from benchmarks.report.records import finish
from benchmarks.serve.prediction import Simulation, StepTime
from benchmarks.traces import SHIPPED, SHIPPED_PRIOR, Trace, load_traces
from sglang_patches.workers.length import StepTimes

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
# Milliseconds of the demo model's steps at batch 8 on two cores, from 362 pairs of neighbouring steps of random widths.
MILLISECONDS = (74, 89, 99, 110, 138, 158, 209, 272)
# Of that the linear layers alone, timed at start, see 27 ms and then about half of what more rows add.
LAYERS, LAYERS_SEE = 0.36, 0.45
WANDER = 0.1  # of a step's logarithm
JUMPS = (0.0, 0.0, 0.2, 0.4, 0.7)  # how slow, in logarithms, the machine may be for a while
JUMP_STEPS = (10, 150)


class KnownTimes(StepTimes):
    """What the policy would choose by if it knew the clock."""

    def __init__(self, true: StepTime) -> None:
        super().__init__(lambda rows: 1.0)
        self._true = true

    def seconds(self, batch: int, widths: Sequence[int]) -> list[float]:
        return [self._true(width, 0.0) for width in widths]


def paces(seed: int) -> Iterator[float]:
    """How much slower than true each step looks."""
    rng = np.random.default_rng(seed)
    while True:
        slowness = rng.choice(JUMPS)
        for _ in range(rng.integers(*JUMP_STEPS)):
            yield float(np.exp(slowness + rng.normal(0.0, WANDER)))


def layers(true: StepTime, batch: int, rows: float) -> float:
    """What the linear layers alone take."""
    plain = true(1, 0.0)
    return plain * LAYERS + LAYERS_SEE * (true(max(1.0, rows / batch), 0.0) - plain)


def reached(
    loads: dict[str, list[Trace]], corpus: Corpus, batch: int, nodes: int, true: StepTime, seed: int | None
) -> dict[str, float]:
    """Throughput over plain decoding of each category, one after the other; seed: of the pace, None for known step times."""
    pace = (lambda: 1.0) if seed is None else partial(next, paces(seed))
    simulation = Simulation(corpus, batch, nodes, true, partial(layers, true, batch), pace)
    if seed is None:
        simulation.policy.times = KnownTimes(true)
    plain = batch / true(1, 0.0)
    figures = {}
    for category, traces in loads.items():
        produced, seconds = simulation.load(traces)
        figures[category] = produced / seconds / plain
    return figures | {ALL: float(np.mean(list(figures.values())))}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("length", __doc__)
    parser.add_argument("--traces", type=Path, nargs="+", default=[SHIPPED])
    parser.add_argument("--prior", type=Path, nargs="*", default=[SHIPPED_PRIOR])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--per-category", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    rows = f"of steps with {WIDTHS} rows a request"
    parser.add_argument("--milliseconds", type=float, nargs=len(WIDTHS), default=MILLISECONDS, help=rows)
    parser.add_argument("--runs", type=int, default=8, help="with another pace each")
    parser.add_argument("--vocab-size", type=int, default=49152)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    traces = [replace(trace, output=trace.output[: given.max_tokens]) for trace in load_traces(*given.traces)]
    loads = {
        name: [traces[i] for i in chosen[: given.per_category]]
        for name, chosen in picks(traces).items()
        if name != ALL and len(chosen) >= given.batch <= given.per_category
    }
    if not loads:
        sys.exit(f"--batch {given.batch}: no category has so many traces")
    corpus = Corpus([trace.output for trace in load_traces(*given.prior)], vocab_size=given.vocab_size)
    true = StepTime(WIDTHS, [milliseconds / 1e3 for milliseconds in given.milliseconds])
    run = partial(reached, loads, corpus, given.batch, given.nodes, true)
    runs = [run(seed) for seed in range(given.runs)]
    finish("length", given, [*given.traces, *given.prior], known=run(None), runs=runs)


if __name__ == "__main__":
    main()
