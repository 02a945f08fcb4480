"""`python -m benchmarks.beside.models`: a target's answers, and what a draft model would have said in place of each token.

The prompts are the shortest of the recorded ones: on a CPU a prompt's prefill takes as long as many steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.options import NEEDED, Parser
from benchmarks.pipeline.pairs import save
from benchmarks.traces import SHIPPED, Trace, load_traces


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("beside.models", __doc__, records=False)
    parser.add("--model", None, "folder of the target; greedy, float32", **NEEDED)
    parser.add("--draft", None, "folder of the draft model", **NEEDED)
    parser.add("--early-exit", None, "file of the target's early exits: what they expect too", type=Path)
    parser.add("--prompts", [SHIPPED], "recorded answers")
    parser.add("--count", 24, "prompts")
    parser.add("--tokens", 64, "of an answer")
    parser.add("--out", None, "file of pairs (.npz)", **NEEDED)
    return parser.parse_args(argv)


def by_length(files: Sequence[Path], tokens: int) -> list[Trace]:
    """The recorded answers of so many tokens or more, cut to these, the shortest prompt first."""
    traces = [trace for trace in load_traces(*files) if len(trace.output) >= tokens]
    cut = [Trace(trace.category, trace.prompt, trace.output[:tokens]) for trace in traces]
    return sorted(cut, key=lambda trace: len(trace.prompt))


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.pipeline.models import pairs_of
    from sglang_patches.early_exit.file import EarlyExits

    load = AutoModelForCausalLM.from_pretrained
    target, draft = (load(path, dtype=torch.float32).eval() for path in (given.model, given.draft))
    exits, pairs = EarlyExits.load(given.early_exit) if given.early_exit else None, []
    for pair in pairs_of(target, draft, by_length(given.prompts, given.tokens)[: given.count], exits):
        pairs.append(pair)
        print(f"{len(pairs)}/{given.count}", end="\r", flush=True)
    save(given.out, pairs, **({"layers": exits.about.layers} if exits else {}))
    right = np.concatenate([pair.ranks() == 0 for pair in pairs]).mean()
    print(
        f"{len(pairs)} answers of {given.tokens} tokens; the draft's first choice is the target's in {right:.3f}"
    )


if __name__ == "__main__":
    main()
