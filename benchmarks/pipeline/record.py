"""`python -m benchmarks.pipeline.record`: pairs of the demo model and noisy copies of it, to be simulated.

The target's answers are its own at each temperature, drawn with the noise that it shares with its drafts. One file for each copy
and temperature, NOISE-t TEMPERATURE.npz, says `agreement` (the share of the target's tokens that are the copy's first choice) and
`temperature`. Minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.options import check_positive
from benchmarks.pipeline.pairs import CHOICES, Pair, recorded, save
from sglang_patches.demo.model import ensure
from sglang_patches.demo.noise import STRENGTHS, add_noise
from sglang_patches.demo.prompts import chat_ids, load_prompts
from sglang_patches.verification.shared_noise import NO_NOISE, best

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
BATCH = 16  # answers at once


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline.record", description=__doc__)
    parser.add_argument("--agreement", type=float, nargs="+", choices=STRENGTHS, default=[0.9, 0.7, 0.5])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=Path, nargs="+", default=[PROMPTS])
    parser.add_argument("--count", type=int, default=64, help="prompts of each file, from its start")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    given = parser.parse_args(argv)
    check_positive(parser, given, "count", "max_tokens")
    return given


def load(strength: float = 0.0) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ensure(), dtype=torch.bfloat16)
    if strength:
        add_noise(model.state_dict(), strength)
    return model.float().eval()


def drawn(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and probabilities of each row, best first. At temperature 0 the likeliest."""
    probabilities = torch.softmax(logits.float() / (temperature or 1.0), dim=-1)
    return best(probabilities, seeds if temperature else torch.full_like(seeds, NO_NOISE), positions, count)


@torch.inference_mode()
def answers(
    model: PreTrainedModel, prompts: Sequence[list[int]], temperature: float, seeds: Sequence[int], most: int
) -> list[list[int]]:
    """The model's answers of at most so many tokens, the last one the end token if there is one. One batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = (torch.arange(longest) >= torch.tensor([[longest - len(prompt)] for prompt in prompts])).long()
    lengths, seed = torch.tensor([len(prompt) for prompt in prompts]), torch.tensor(seeds)
    out, cache, ends = [], None, model.generation_config.eos_token_id
    for step in range(most):
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        found = model(
            ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = found.past_key_values
        ids = drawn(found.logits[:, -1], temperature, seed, lengths + step, 1)[0]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        out.append(ids)
    rows = torch.cat(out, 1).tolist()
    return [row[: row.index(ends) + 1] if ends in row else row for row in rows]


def chooser(
    model: PreTrainedModel, temperature: float, seed: int
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The model's choices after each token of a text."""

    @torch.inference_mode()
    def choose(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        logits = model(torch.from_numpy(text[None].astype(np.int64))).logits[0]
        positions = torch.arange(len(text)) + 1
        tokens, chances = drawn(logits, temperature, torch.full_like(positions, seed), positions, CHOICES)
        return tokens.numpy(), chances.numpy()

    return choose


def target_answers(
    given: argparse.Namespace,
) -> Iterator[tuple[float, list[tuple[list[int], list[int], int]]]]:
    """For each temperature prompt, answer and seed of each request."""
    from transformers import AutoTokenizer

    prompts = [prompt for file in given.prompts for prompt in load_prompts(file)[: given.count]]
    ids = sorted(chat_ids(AutoTokenizer.from_pretrained(ensure()), prompts), key=len)
    seeds = np.random.default_rng(0).integers(0, 2**62, len(ids)).tolist()
    model = load()
    for temperature in given.temperature:
        found = []
        for begin in track(
            range(0, len(ids), BATCH), f"answers at {temperature}", console=Console(stderr=True)
        ):
            part = ids[begin : begin + BATCH], seeds[begin : begin + BATCH]
            found += zip(
                part[0], answers(model, part[0], temperature, part[1], given.max_tokens), part[1], strict=True
            )
        yield temperature, found


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    texts = dict(target_answers(given))
    for agreement in given.agreement:
        model = load(STRENGTHS[agreement])
        for temperature, requests in texts.items():
            pairs: list[Pair] = [
                recorded(prompt, answer, chooser(model, temperature, seed))
                for prompt, answer, seed in track(
                    requests, f"draft of {agreement}", console=Console(stderr=True)
                )
            ]
            agreed = float(np.concatenate([pair.ranks() == 0 for pair in pairs]).mean())
            out = given.out / f"{agreement}-t{temperature:g}.npz"
            save(out, pairs, agreement=round(agreed, 2), temperature=temperature)
            print(out.name, f"agreement {agreed:.3f}", sum(map(len, pairs)), "tokens", flush=True)


if __name__ == "__main__":
    main()
