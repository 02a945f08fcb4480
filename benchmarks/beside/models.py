"""`python -m benchmarks.beside.models`: a target's answers, and what a draft model would have said in place of each token.

The prompts are the shortest of the recorded ones: on a CPU a prompt's prefill takes as long as many steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.pipeline.pairs import CHOICES, Pair, recorded, save
from benchmarks.pipeline.record import exit_choosers
from benchmarks.traces import SHIPPED, Trace, load_traces
from sglang_patches.early_exit.adapter import EarlyExits


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside.models", description="Records pairs of two models' choices."
    )
    parser.add_argument("--model", type=Path, required=True, help="the target; greedy, float32")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument(
        "--early-exit", type=Path, help="file of the target's early exits: what they expect too"
    )
    parser.add_argument("--prompts", type=Path, nargs="+", default=[SHIPPED], help="recorded answers")
    parser.add_argument("--count", type=int, default=24, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--out", type=Path, required=True, help="file of pairs (.npz)")
    return parser.parse_args(argv)


def by_length(files: Sequence[Path], tokens: int) -> list[Trace]:
    """The recorded answers of so many tokens or more, cut to these, the shortest prompt first."""
    traces = [trace for trace in load_traces(*files) if len(trace.output) >= tokens]
    cut = [Trace(trace.category, trace.prompt, trace.output[:tokens]) for trace in traces]
    return sorted(cut, key=lambda trace: len(trace.prompt))


def own_answer(target, trace: Trace) -> np.ndarray:
    """int32: the target's greedy answer, as long as the recorded one. That one may be of another precision. Only what follows their
    first difference is generated. target: a causal model of transformers."""
    import torch

    size, tokens = len(trace.prompt), len(trace.output)
    found = logits(target, np.append(trace.prompt, trace.output))[size - 1 : -1].argmax(-1).numpy()
    same = int(np.argmin(np.append(found == trace.output, False)))
    begin = np.append(trace.prompt, trace.output[:same])
    if same == tokens:
        return begin[size:]
    ids = torch.from_numpy(begin[None].astype(np.int64))
    sizes = {"min_new_tokens": tokens - same, "max_new_tokens": tokens - same}
    said = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **sizes)
    return said[0, size:].numpy().astype(np.int32)


def logits(model, text: np.ndarray):
    """float32 tensor [tokens, vocabulary]: of the next token after each."""
    import torch

    with torch.inference_mode():
        return model(torch.from_numpy(text[None].astype(np.int64))).logits[0]


def likeliest(model, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The model's choices after each token, best first, and their probabilities."""
    distributions = logits(model, text).softmax(-1)
    probabilities, choices = distributions.topk(min(CHOICES, distributions.shape[-1]))
    return choices.numpy(), probabilities.numpy()


def pairs_of(target, draft, traces: Iterable[Trace], exits: EarlyExits | None = None) -> Iterator[Pair]:
    expect = exit_choosers(target, exits, 0.0, 0) if exits else None
    for trace in traces:
        answer = own_answer(target, trace).tolist()
        yield recorded(trace.prompt.tolist(), answer, lambda text: likeliest(draft, text), expect)


def main(argv: Sequence[str] | None = None) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    given = parse(argv)
    load = AutoModelForCausalLM.from_pretrained
    target, draft = (load(path, dtype=torch.float32).eval() for path in (given.model, given.draft))
    pairs = []
    exits = EarlyExits.load(given.early_exit) if given.early_exit else None
    for pair in pairs_of(target, draft, by_length(given.prompts, given.tokens)[: given.count], exits):
        pairs.append(pair)
        print(f"{len(pairs)}/{given.count}", end="\r", flush=True)
    save(given.out, pairs, **({"layers": exits.about.layers} if exits else {}))
    right = np.concatenate([pair.ranks() == 0 for pair in pairs])
    print(
        f"{len(pairs)} answers of {given.tokens} tokens; the draft's first choice is the target's in {right.mean():.3f}"
    )


if __name__ == "__main__":
    main()
