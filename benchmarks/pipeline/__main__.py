"""`python -m benchmarks.pipeline`: throughput of drafting beside the target, on a virtual clock, before there is hardware for it.

The draft side, the cache, the predictors and the fallbacks are the product's; times and models are given. Times come as points
ROWS:MILLISECONDS of a forward, with a line between and beyond them. Models are synthetic, or recorded pairs
(benchmarks.pipeline.record), beside which a real datastore runs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from benchmarks.options import check_positive, options
from benchmarks.pipeline import experiments
from benchmarks.pipeline.ceiling import (
    AGAIN,
    NOTHING,
    OTHER,
    PRIOR,
    REFUSED,
    ceiling,
    datastores,
    partly_known,
)
from benchmarks.pipeline.contest import against_shapes, contest
from benchmarks.pipeline.exits import bounds, by_choices, by_window
from benchmarks.pipeline.experiments import Case, Question, break_even
from benchmarks.pipeline.pairs import Pair, load, synthetic_pairs
from benchmarks.pipeline.simulation import Times
from benchmarks.report.records import finish
from benchmarks.serve.prediction import StepTime
from benchmarks.traces import SHIPPED_LANGUAGE, SHIPPED_PRIOR, load_traces
from datastore_service.client import Datastore
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.types import Entry, Opening
from sglang_patches.options import Options

ASKED = ("forecast", "misses", "spreads", "sources", "fallbacks", "ratios")
CEILING, DATASTORES = "ceiling", "datastores"  # of DOUBLE, the others of SAGUARO
METHODS, SHAPES = "methods", "shapes"  # of all methods, and of the planner
EXITS = "exits"  # of early exits
MIXED, REPEATED, PARTLY = "mixed", "repeated", "partly known"  # loads
REFUSALS = 1 << 14  # kept of a session, more than it has
GROUPS = 20  # synthetic pairs: intervals are over them


def point(text: str) -> tuple[int, float]:
    rows, _, milliseconds = text.partition(":")
    return int(rows), float(milliseconds)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options("pipeline", __doc__)
    parser.add_argument(
        "--ask",
        nargs="+",
        choices=(*ASKED, CEILING, DATASTORES, METHODS, SHAPES, EXITS),
        default=ASKED,
        help="forecast alone is a calculator; all from ceiling on want a K of more than a round's tokens, as 31",
    )
    parser.add_argument("--target", nargs="+", default=["1:20", "256:24"], metavar="ROWS:MS")
    parser.add_argument("--draft", nargs="+", default=["1:2", "256:2.4"], metavar="ROWS:MS")
    parser.add_argument("--delay-ms", type=float, default=0.1, help="of a message to or from the draft side")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--speed", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32], help="target over draft, one row"
    )
    parser.add_argument("--lookahead", type=int, default=7, help="K, drafted tokens of a speculation")
    parser.add_argument(
        "--draft-rows",
        type=int,
        default=Options().draft_rows,
        help="of a draft forward, and outcomes of a step that are drafted for, over all requests",
    )
    parser.add_argument("--e-miss", type=float, default=2.0, help="tokens a step of the datastore's trees")
    parser.add_argument("--tokens", type=int, default=4000, help="of synthetic pairs, for each figure")
    parser.add_argument(
        "--prior", type=Path, nargs="*", default=[SHIPPED_PRIOR], help="recorded answers, for recorded pairs"
    )
    parser.add_argument(
        "--other-prior",
        type=Path,
        nargs="*",
        default=[SHIPPED_LANGUAGE],
        help="answers of another domain, for datastores",
    )
    parser.add_argument("--vocab-size", type=int, default=49152, help="of recorded pairs")
    parser.add_argument(
        "--pairs",
        type=Path,
        nargs="*",
        default=[],
        help="files of benchmarks.pipeline.record; else synthetic ones:",
    )
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--exponent", type=float, default=0.6, help="r: F guesses miss as F^-r")
    parser.add_argument(
        "--second", type=float, default=0.5, help="a wrong first choice's second is right so often"
    )
    parser.add_argument(
        "--known", type=float, default=0.7, help="share of right tokens in the datastore's copy of the texts"
    )
    given = parser.parse_args(argv)
    check_positive(
        parser,
        given,
        "batch",
        "speed",
        "lookahead",
        "draft_rows",
        "tokens",
        "acceptance",
        "exponent",
        "known",
    )
    if not 1 <= given.e_miss < given.lookahead + 1:
        parser.error(f"--e-miss: {given.e_miss} is not between 1 and --lookahead + 1")
    if DATASTORES in given.ask and not given.pairs:
        parser.error("--ask datastores: only of recorded pairs (--pairs)")
    if EXITS in given.ask and not given.pairs:
        parser.error("--ask exits: only of pairs that were recorded with exits (--pairs)")
    return given


def forward_time(points: Sequence[str]) -> StepTime:
    """Seconds by rows."""
    rows, milliseconds = zip(*sorted(map(point, points)), strict=True)
    return partial(StepTime(rows, [ms / 1e3 for ms in milliseconds]), context=0.0)


def synthetic_cases(given: argparse.Namespace) -> tuple[list[Case], Callable[[Case, int], list[Pair]]]:
    """The models to ask for, and what gives pairs of them."""

    @lru_cache
    def make(acceptance: float, count: int) -> list[Pair]:
        length = given.tokens // count + given.lookahead + 1
        return synthetic_pairs(count, length, acceptance, given.exponent, given.second, seed=0)

    cases = [{"acceptance": acceptance} for acceptance in given.acceptance]
    return cases, lambda case, batch: make(case["acceptance"], max(GROUPS, 2 * batch))


def recorded_cases(given: argparse.Namespace) -> tuple[list[Case], Callable[[Case, int], list[Pair]]]:
    """The same of files, in a random order that does not depend on the file."""
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
    entries = [
        Entry(
            f"served/{at}",
            tokens=np.append(pair.prompt, pair.tokens),
            opening=Opening(prompt_length=len(pair.prompt)),
            closing=True,
        )
        for at, pair in enumerate(served)
    ]

    def make() -> Datastore:
        datastore = EmbeddedDatastore(lambda: Engine(vocab_size, segments, limits=limits))
        datastore.post(entries)
        return datastore

    return make


def stored(given: argparse.Namespace, pairs: Sequence[Pair]) -> dict[str, Callable[[], Datastore]]:
    """What makes each datastore of `ceiling.datastores`. pairs: what it is asked about."""
    make = partial(recorded_datastore, given.vocab_size)
    return {
        NOTHING: make([]),
        OTHER: make(given.other_prior),
        PRIOR: make(given.prior),
        REFUSED: make(given.prior, limits=Limits(refusals=REFUSALS)),
        AGAIN: make(given.prior, pairs),
    }


def loads(given: argparse.Namespace, case: Case, pairs: Sequence[Pair]) -> dict[str, Callable[[], Datastore]]:
    """What makes the datastore of each load of these pairs."""
    if not given.pairs:
        return {PARTLY: partly_known(pairs, given.known)}
    load = str(case.get("load", MIXED))
    made = {load: recorded_datastore(given.vocab_size, given.prior)}
    if load == MIXED:
        made[REPEATED] = recorded_datastore(given.vocab_size, given.prior, pairs)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    cases, pairs = (recorded_cases if given.pairs else synthetic_cases)(given)
    datastore = recorded_datastore(given.vocab_size, given.prior) if given.pairs else None
    times = Times(forward_time(given.target), forward_time(given.draft), given.delay_ms / 1e3)
    question = Question(times, given.lookahead, given.draft_rows, given.e_miss, pairs, datastore)
    middle, small = cases[len(cases) // 2], given.batch[0]
    answers: dict[str, object] = {}
    if "forecast" in given.ask:
        answers["forecast"] = experiments.forecast(question, cases, given.batch)
    if "misses" in given.ask:
        answers["misses"] = experiments.misses(question, middle)
    if "spreads" in given.ask:
        answers["spreads"] = experiments.spreads(question, cases, small)
    if "sources" in given.ask and datastore is not None:
        answers["sources"] = experiments.sources(question, cases, small)
    if "fallbacks" in given.ask:
        rows = experiments.fallbacks(question, cases if given.pairs else [middle], given.batch)
        found = {name: experiments.critical(question, middle, name) for name in ("none", "datastore")}
        answers["fallbacks"] = {"rows": rows, "critical": found}
    if "ratios" in given.ask:
        rows = list(experiments.ratios(question, middle, given.batch, given.speed))
        pays = {
            batch: break_even([row for row in rows if row["batch"] == batch], "over_datastore")
            for batch in given.batch
        }
        answers["ratios"] = {"rows": rows, "break_even": pays}
    if CEILING in given.ask:
        rows = list(ceiling(question, cases, small, given.known))
        answers[CEILING] = {"rows": rows, "known": None if given.pairs else given.known}
    if DATASTORES in given.ask:
        rows = datastores(question, cases, small, lambda case: stored(given, pairs(case, small)))
        answers[DATASTORES] = list(rows)
    if METHODS in given.ask:
        rows = contest(
            question,
            cases,
            given.batch,
            given.speed,
            lambda case, batch: loads(given, case, pairs(case, batch)),
        )
        answers[METHODS] = list(rows)
    if SHAPES in given.ask:
        answers[SHAPES] = list(against_shapes(question, cases, small, given.speed))
    if EXITS in given.ask:
        layers = int(middle["layers"])
        answers[EXITS] = {
            "choices": list(by_choices(question, cases, small, given.speed, layers)),
            "bounds": list(bounds(question, cases, small, given.speed, layers)),
            "windows": list(by_window(question, middle, small, given.speed, layers)),
        }
    priors = [*given.prior, *(given.other_prior if DATASTORES in given.ask else [])]
    finish("pipeline", given, [*given.pairs, *(priors if given.pairs else [])], **answers)


if __name__ == "__main__":
    main()
