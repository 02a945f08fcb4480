"""`python -m benchmarks.beside`: drafting beside the target against plain decoding, SSSD, STANDALONE and the simulator's forecasts.

With --speed the target's latency is emulated, by a sleep inside its forwards (benchmarks.emulated_latency): so many times a full
draft forward. Without it, what is measured is what the processor computes, in the type that suits it. Each process has one core.
Prompts come from a file of pairs (benchmarks.beside.models), which also says what the two models say.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.beside.servers import BESIDE, VARIANTS, add_servers, check_variants
from benchmarks.options import NEEDED, Parser, number, own_dtype
from sglang_patches.options import Options


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("beside", __doc__, "var/beside.json")
    parser.add("--pairs", None, "file of python -m benchmarks.beside.models", **NEEDED)
    parser.add("--speed", [], "emulated target step over a full draft forward", type=number(1.0))
    parser.add("--groups", 3, "of prompts, for each batch size")
    add_servers(
        parser, VARIANTS, ["plain", "sssd", "saguaro", "double"], batch=[1, 4, 8], nodes=4, warm=8, plain_tokens=8,
        phrase=Options().draft_phrase, minutes=600.0,
    )  # fmt: skip
    given = parser.parse_args(argv)
    check_variants(parser, given, "plain", "sssd")
    if given.speed and not set(BESIDE) & set(given.variants):
        parser.error(
            f"--speed: none of {', '.join(BESIDE)} is there, of whose draft forwards it is a multiple"
        )
    return given


def length_of(given: argparse.Namespace) -> str:
    """The servers' --specstore-length: an emulated step takes as long whatever is verified."""
    return "static" if given.speed else "adaptive"


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from transformers import AutoTokenizer

    from benchmarks.beside.run import Run, measured
    from benchmarks.beside.summary import summarise
    from benchmarks.pipeline.drafts import middle
    from benchmarks.pipeline.pairs import load
    from benchmarks.replay.methods import Corpus
    from benchmarks.traces import load_traces

    pairs, what = load(given.pairs)
    if len(pairs) < given.groups * max(given.batch):
        sys.exit(f"--pairs: {len(pairs)} prompts, {given.groups * max(given.batch)} are needed")
    if "mirror" in given.variants and not pairs[0].exits:
        sys.exit("--pairs: without what the early exits expect; record them with --early-exit")
    exit = middle(pairs, int(what["layers"])) if pairs[0].exits else None
    size = len(AutoTokenizer.from_pretrained(given.model))
    corpus = Corpus([trace.output for trace in load_traces(*given.prior)], vocab_size=size)
    dtype, files = "float32" if given.speed else own_dtype(), [given.pairs, *given.prior]
    with measured("beside", given, files, summarise, dtype, length_of(given), bool(given.speed)) as servers:
        run = Run(servers, pairs, corpus, length_of(given), exit)
        run.warm_up()
        run.measure_all()


if __name__ == "__main__":
    main()
