"""`python -m benchmarks.pipeline`: throughput of drafting beside the target, on a virtual clock, before there is hardware for it.

The draft side, the cache, the predictors and the fallbacks are the product's; times and models are given. Times come as points
ROWS:MILLISECONDS of a forward, with a line between and beyond them. Models are synthetic, or recorded pairs (benchmarks.pipeline.pairs).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

from benchmarks.options import check_positive, options
from benchmarks.pipeline import experiments
from benchmarks.pipeline.experiments import Question, break_even
from benchmarks.pipeline.pairs import Pair, load, synthetic_pairs
from benchmarks.pipeline.simulation import Times
from benchmarks.report.records import finish
from benchmarks.serve.prediction import StepTime

ASKED = ("forecast", "misses", "spreads", "fallbacks", "ratios")


def point(text: str) -> tuple[int, float]:
    rows, _, milliseconds = text.partition(":")
    return int(rows), float(milliseconds)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("pipeline", __doc__)
    parser.add_argument(
        "--ask", nargs="+", choices=ASKED, default=ASKED, help="forecast alone is a calculator"
    )
    parser.add_argument("--target", nargs="+", default=["1:20", "256:24"], metavar="ROWS:MS")
    parser.add_argument("--draft", nargs="+", default=["1:2", "256:2.4"], metavar="ROWS:MS")
    parser.add_argument("--delay-ms", type=float, default=0.1, help="of a message to or from the draft side")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--speed", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32], help="target over draft, one row"
    )
    parser.add_argument("--lookahead", type=int, default=7, help="K, drafted tokens of a speculation")
    parser.add_argument("--guesses", type=int, default=24, help="outcomes that are drafted for, a request")
    parser.add_argument("--e-miss", type=float, default=2.0, help="tokens a step of the datastore's trees")
    parser.add_argument("--steps", type=int, default=1200, help="of single requests, for each figure")
    parser.add_argument("--pairs", type=Path, help="recorded pairs; else synthetic ones with:")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--exponent", type=float, default=0.6, help="r: F guesses miss as F^-r")
    parser.add_argument(
        "--second", type=float, default=0.5, help="a wrong first choice's second is right so often"
    )
    given = parser.parse_args(argv)
    check_positive(parser, given, "batch", "speed", "lookahead", "guesses", "steps", "acceptance", "exponent")
    if not 1 <= given.e_miss < given.lookahead + 1:
        parser.error(f"--e-miss: {given.e_miss} is not between 1 and --lookahead + 1")
    return given


def forward_time(points: Sequence[str]) -> StepTime:
    """Seconds by rows."""
    rows, milliseconds = zip(*sorted(map(point, points)), strict=True)
    return partial(StepTime(rows, [ms / 1e3 for ms in milliseconds]), context=0.0)


def pairs_of(given: argparse.Namespace) -> tuple[list[float | None], object]:
    """The acceptance rates to ask for, and what gives pairs of them."""
    if given.pairs is None:
        length = given.steps * (given.lookahead + 1)
        make = lru_cache(
            partial(synthetic_pairs, length=length, exponent=given.exponent, first=given.second, seed=0)
        )
        return given.acceptance, lambda acceptance, count: make(count, acceptance=acceptance)
    recorded = [pair for pair in load(given.pairs) if len(pair) > given.lookahead + 1]

    def some(acceptance: None, count: int) -> list[Pair]:
        return [recorded[at % len(recorded)] for at in range(count)]

    return [None], some


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    rates, pairs = pairs_of(given)
    times = Times(forward_time(given.target), forward_time(given.draft), given.delay_ms / 1e3)
    question = Question(times, given.lookahead, given.guesses, given.e_miss, given.steps, pairs)
    middle, small = rates[len(rates) // 2], given.batch[0]
    answers: dict[str, object] = {}
    if "forecast" in given.ask:
        rows = [question.row(rate, batch, fallback="by b*") for rate in rates for batch in given.batch]
        answers["forecast"] = rows
    if "misses" in given.ask:
        answers["misses"] = experiments.misses(question, middle, 8)
    if "spreads" in given.ask:
        answers["spreads"] = list(experiments.spreads(question, rates, small))
    if "fallbacks" in given.ask:
        rows = list(experiments.fallbacks(question, middle, given.batch))
        found = {name: experiments.critical(question, middle, name) for name in ("none", "datastore")}
        answers["fallbacks"] = {"rows": rows, "critical": found}
    if "ratios" in given.ask:
        rows = list(experiments.ratios(question, middle, given.batch, given.speed))
        pays = {
            batch: break_even([row for row in rows if row["batch"] == batch], "over_datastore")
            for batch in given.batch
        }
        answers["ratios"] = {"rows": rows, "break_even": pays}
    finish("pipeline", given, [given.pairs] if given.pairs else [], **answers)


if __name__ == "__main__":
    main()
