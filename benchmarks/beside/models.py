"""`python -m benchmarks.beside.models`: a target's answers, and what a draft model would have said in place of each token.

The prompts are the shortest of the recorded ones: on a CPU a prompt's prefill takes as long as many steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.pipeline.pairs import Pair, recorded, save
from benchmarks.traces import SHIPPED, load_traces


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside.models", description="Records pairs of two models' choices."
    )
    parser.add_argument("--model", type=Path, required=True, help="the target; greedy, float32")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[SHIPPED], help="recorded answers")
    parser.add_argument("--count", type=int, default=24, help="prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--out", type=Path, required=True, help="file of pairs (.npz)")
    return parser.parse_args(argv)


def shortest(files: Sequence[Path], count: int, tokens: int) -> list[np.ndarray]:
    """The shortest prompts whose recorded answers have so many tokens, in the files' order."""
    prompts = [trace.prompt for trace in load_traces(*files) if len(trace.output) >= tokens]
    chosen = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))[:count]
    return [prompts[at] for at in sorted(chosen)]


def pair_of(target, draft, prompt: np.ndarray, tokens: int) -> Pair:
    """target, draft: causal models of transformers."""
    import torch

    def distributions(text: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return draft(torch.from_numpy(text[None].astype(np.int64))).logits[0].softmax(-1).numpy()

    ids = torch.from_numpy(prompt[None].astype(np.int64))
    sizes = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    said = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **sizes)
    return recorded(prompt.tolist(), said[0, len(prompt) :].tolist(), distributions)


def main(argv: Sequence[str] | None = None) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    given = parse(argv)
    load = AutoModelForCausalLM.from_pretrained
    target, draft = (load(path, dtype=torch.float32).eval() for path in (given.model, given.draft))
    pairs = []
    for prompt in shortest(given.prompts, given.count, given.tokens):
        pairs.append(pair_of(target, draft, prompt, given.tokens))
        print(f"{len(pairs)}/{given.count}", end="\r", flush=True)
    save(given.out, pairs)
    right = np.concatenate([pair.ranks() == 0 for pair in pairs])
    print(
        f"{len(pairs)} answers of {given.tokens} tokens; the draft's first choice is the target's in {right.mean():.3f}"
    )


if __name__ == "__main__":
    main()
