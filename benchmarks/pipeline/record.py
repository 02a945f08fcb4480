"""`python -m benchmarks.pipeline.record`: pairs of the demo model and noisy copies of it, to be simulated.

The target's answers at temperature 0 are recorded ones (benchmarks.record) if the prompts are, else its own, drawn with the noise
that it shares with its drafts. One file for each load, copy and temperature, LOAD-NOISE-tTEMPERATURE.npz, says `load`, `agreement`
(the share of the target's tokens that are the copy's first choice) and `temperature`. Minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.options import NEEDED, Parser
from benchmarks.pipeline.pairs import Pair, recorded, save
from benchmarks.serve.cases import CASES, Pool
from benchmarks.traces import SHIPPED, load_traces, recorded_rows
from sglang_patches.demo.model import ensure
from sglang_patches.demo.noise import STRENGTHS

BATCH = 16  # answers at once
MIXED, TASKS = "mixed", "tasks"
GENERATED = ("followup", "long", "unrelated")  # loads whose answers are not recorded


class Request(NamedTuple):
    """seed: of the noise. load: which file of pairs it belongs to."""

    prompt: list[int]
    answer: list[int]
    seed: int
    load: str


class Asked(NamedTuple):
    """recorded: its greedy answer, if there is one."""

    prompt: list[int]
    recorded: list[int] | None
    load: str


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("pipeline.record", __doc__, records=False)
    parser.add(
        "--agreement", [0.9, 0.7, 0.5], "how often a copy's first choice is the model's", choices=STRENGTHS
    )
    parser.add("--temperature", [0.0, 1.0], "of the answers")
    loads = (MIXED, TASKS, *GENERATED)
    parser.add("--load", MIXED, "a case of benchmarks.serve; tasks: a file for each category", choices=loads)
    parser.add("--traces", [SHIPPED], "the demo model's answers")
    parser.add("--without", [], "whose answers are left out", metavar="CATEGORY")
    parser.add("--count", 64, "of them, drawn at random")
    parser.add("--max-tokens", 128, "of an answer")
    parser.add("--exits", False, "also what the demo model's early exits expect")
    parser.add("--out", None, "folder of the files of pairs", **NEEDED)
    return parser.parse_args(argv)


def asked(given: argparse.Namespace) -> list[Asked]:
    """The prompts, the shortest first."""
    if given.load in GENERATED:
        from transformers import AutoTokenizer

        rows = [row for path in given.traces for row in recorded_rows(path)]
        pool = Pool(rows, AutoTokenizer.from_pretrained(ensure()))
        (groups,) = CASES[given.load](pool, [1], given.count).groups.values()
        found = [Asked(list(request.prompt), None, given.load) for group in groups for request in group]
    else:
        traces = [trace for trace in load_traces(*given.traces) if trace.category not in given.without]
        found = [
            Asked(trace.prompt.tolist(), trace.output[: given.max_tokens].tolist(), trace.category)
            for trace in traces
        ]
        if given.load != TASKS:
            found = [request._replace(load=MIXED) for request in found]
        random.Random(0).shuffle(found)
    return sorted(found[: given.count], key=lambda request: len(request.prompt))


def target_answers(given: argparse.Namespace) -> Iterator[tuple[float, list[Request]]]:
    """For each temperature the requests."""
    from benchmarks.pipeline.models import answers, load

    requests = asked(given)
    prompts, known = [request.prompt for request in requests], [request.recorded for request in requests]
    seeds = np.random.default_rng(0).integers(0, 2**62, len(prompts)).tolist()
    model = load() if any(given.temperature) or None in known else None
    for temperature in given.temperature:
        found = known
        if temperature or None in known:
            parts = [slice(begin, begin + BATCH) for begin in range(0, len(prompts), BATCH)]
            found = []
            for part in track(parts, f"answers at {temperature}", console=Console(stderr=True)):
                found += answers(model, prompts[part], temperature, seeds[part], given.max_tokens)
        yield temperature, [*map(Request, prompts, found, seeds, (request.load for request in requests))]


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from benchmarks.pipeline.models import chooser, exit_choosers, load
    from sglang_patches.early_exit.file import EarlyExits
    from sglang_patches.launch.trained import demo_exits

    given.out.mkdir(parents=True, exist_ok=True)
    texts = dict(target_answers(given))
    target, exits = (load(), EarlyExits.load(demo_exits())) if given.exits else (None, None)
    what = {} if exits is None else {"layers": exits.about.layers}
    for agreement in given.agreement:
        model, console = load(STRENGTHS[agreement]), Console(stderr=True)
        for temperature, requests in texts.items():
            pairs: dict[str, list[Pair]] = {}
            for prompt, answer, seed, name in track(requests, f"draft of {agreement}", console=console):
                expect = exit_choosers(target, exits, temperature, seed) if exits else None
                pair = recorded(prompt, answer, chooser(model, temperature, seed), expect)
                pairs.setdefault(name, []).append(pair)
            for name, of in pairs.items():
                agreed = float(np.concatenate([pair.ranks() == 0 for pair in of]).mean())
                out = given.out / f"{name}-{agreement}-t{temperature:g}.npz"
                save(out, of, load=name, agreement=round(agreed, 2), temperature=temperature, **what)
                print(out.name, f"agreement {agreed:.3f}", sum(map(len, of)), "tokens", flush=True)


if __name__ == "__main__":
    main()
