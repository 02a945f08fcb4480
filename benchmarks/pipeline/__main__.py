"""`python -m benchmarks.pipeline`: throughput of drafting beside the target, on a virtual clock, before there is hardware for it.

The draft side, the cache, the predictors and the fallbacks are the product's; times and models are given. Times come as points
ROWS:MILLISECONDS of a forward, with a line between and beyond them. Models are synthetic, or recorded pairs
(benchmarks.pipeline.record), beside which a real datastore runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import Parser
from benchmarks.pipeline.tables import EXITS, SECTIONS, STORES
from benchmarks.report.records import finish
from benchmarks.traces import SHIPPED_LANGUAGE, SHIPPED_PRIOR
from sglang_patches.options import Options

# For a K of one round; the others want one of more than a round's tokens, as 31.
ASKED = ["forecast", "misses", "spreads", "fallbacks", "ratios"]
OF_PAIRS = (STORES, EXITS)  # of recorded ones alone


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("pipeline", __doc__)
    add = parser.add
    ask = "what is asked; forecast alone is a calculator; those that are not default want a --lookahead as 31"
    add("--ask", ASKED, ask, choices=SECTIONS)
    add("--target", ["1:20", "256:24"], "points of the target", metavar="ROWS:MS")
    add("--draft", ["1:2", "256:2.4"], "points of the draft model", metavar="ROWS:MS")
    add("--delay-ms", 0.1, "of a message to or from the draft side", type=float)
    add("--batch", [1, 4, 16], "requests at once")
    add("--speed", [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], "target over draft, one row")
    add("--lookahead", 7, "K, drafted tokens of a speculation")
    rows = "of a draft forward, and outcomes of a step that are drafted for, over all requests"
    add("--draft-rows", Options().draft_rows, rows)
    add("--e-miss", 2.0, "tokens per step of the datastore's trees, for synthetic pairs")
    add("--tokens", 4000, "of synthetic pairs, for each figure")
    add("--prior", [SHIPPED_PRIOR], "recorded answers, for recorded pairs", nargs="*")
    add("--other-prior", [SHIPPED_LANGUAGE], "answers of another domain, for datastores", nargs="*")
    add("--vocab-size", 49152, "of recorded pairs")
    pairs = "files of benchmarks.pipeline.record; left out: synthetic ones of the options below"
    add("--pairs", [], pairs, type=Path, nargs="*")
    add("--acceptance", [0.5, 0.6, 0.7, 0.8, 0.9], "how often the draft model's first choice is right")
    add("--exponent", 0.6, "r: F guesses miss as F^-r")
    add("--second", 0.5, "a wrong first choice's second is right so often", type=float)
    add("--known", 0.7, "share of right tokens in the datastore's copy of the texts")
    given = parser.parse_args(argv)
    if not 1 <= given.e_miss < given.lookahead + 1:
        parser.error(f"--e-miss: {given.e_miss} is not between 1 and --lookahead + 1")
    for name in OF_PAIRS:
        if name in given.ask and not given.pairs:
            parser.error(f"--ask {name}: only of recorded pairs (--pairs), for {EXITS} recorded with exits")
    return given


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from benchmarks.pipeline.table import EXPERIMENTS, Asked

    asked = Asked(given)
    answers = {name: answer(asked) for name, answer in EXPERIMENTS.items() if name in given.ask}
    finish("pipeline", given, asked.files, **{name: of for name, of in answers.items() if of is not None})


if __name__ == "__main__":
    main()
