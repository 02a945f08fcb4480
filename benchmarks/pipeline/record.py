"""`python -m benchmarks.pipeline.record`: pairs of the demo model and noisy copies of it, to be simulated.

The target's answers at temperature 0 are recorded ones (benchmarks.record) if the prompts are, else its own, drawn with the noise
that it shares with its drafts. One file for each load, copy and temperature, LOAD-NOISE-tTEMPERATURE.npz, says `load`, `agreement`
(the share of the target's tokens that are the copy's first choice) and `temperature`. Minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.options import check_positive
from benchmarks.pipeline.pairs import CHOICES, Pair, recorded, save
from benchmarks.serve.cases import CASES, Pool
from benchmarks.traces import SHIPPED, load_traces, recorded_rows
from sglang_patches.demo.model import ensure
from sglang_patches.demo.noise import STRENGTHS, add_noise
from sglang_patches.early_exit.adapter import EarlyExits
from sglang_patches.launch.early_exits import demo_exits
from sglang_patches.verification.shared_noise import NO_NOISE, best

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 16  # answers at once
EXIT_CHOICES = 8  # that are kept of an early exit
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline.record", description=__doc__)
    parser.add_argument("--agreement", type=float, nargs="+", choices=STRENGTHS, default=[0.9, 0.7, 0.5])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--load",
        choices=(MIXED, TASKS, *GENERATED),
        default=MIXED,
        help="a case of benchmarks.serve; tasks: a file for each category",
    )
    parser.add_argument("--traces", type=Path, nargs="+", default=[SHIPPED], help="the demo model's answers")
    parser.add_argument(
        "--without", nargs="*", default=[], metavar="CATEGORY", help="whose answers are left out"
    )
    parser.add_argument("--count", type=int, default=64, help="of them, drawn at random")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--exits", action="store_true", help="also what the demo model's early exits expect")
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


def exit_choosers(
    model: PreTrainedModel, exits: EarlyExits, temperature: float, seed: int
) -> dict[int, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]]:
    """What the target's early exits expect after each token of a text, by layer."""

    @lru_cache(1)
    @torch.inference_mode()
    def states(text: bytes) -> tuple[torch.Tensor, ...]:
        ids = torch.from_numpy(np.frombuffer(text, np.int32).astype(np.int64))
        return model(ids[None], output_hidden_states=True).hidden_states

    @torch.inference_mode()
    def expect(layer: int, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        adapted = exits.adapters[layer](states(text.tobytes())[layer][0])
        logits = torch.nn.functional.linear(adapted, model.get_output_embeddings().weight)
        positions = torch.arange(len(text)) + 1
        seeds = torch.full_like(positions, seed)
        tokens, chances = drawn(logits, temperature, seeds, positions, EXIT_CHOICES)
        return tokens.numpy(), chances.numpy()

    return {layer: partial(expect, layer) for layer in exits.adapters}


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
            Asked(
                trace.prompt.tolist(),
                trace.output[: given.max_tokens].tolist(),
                trace.category if given.load == TASKS else MIXED,
            )
            for trace in traces
        ]
        random.Random(0).shuffle(found)
    return sorted(found[: given.count], key=lambda request: len(request.prompt))


def target_answers(given: argparse.Namespace) -> Iterator[tuple[float, list[Request]]]:
    """For each temperature the requests."""
    requests = asked(given)
    prompts, known = [request.prompt for request in requests], [request.recorded for request in requests]
    seeds = np.random.default_rng(0).integers(0, 2**62, len(prompts)).tolist()
    model = load() if any(given.temperature) or None in known else None
    for temperature in given.temperature:
        found = known
        if temperature or None in known:
            assert model is not None
            found = []
            for begin in track(
                range(0, len(prompts), BATCH), f"answers at {temperature}", console=Console(stderr=True)
            ):
                part = slice(begin, begin + BATCH)
                found += answers(model, prompts[part], temperature, seeds[part], given.max_tokens)
        loads = [request.load for request in requests]
        yield temperature, [*map(Request, prompts, found, seeds, loads)]


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    texts = dict(target_answers(given))
    target, exits = (load(), EarlyExits.load(demo_exits())) if given.exits else (None, None)
    what = {} if exits is None else {"layers": exits.about.layers}
    for agreement in given.agreement:
        model = load(STRENGTHS[agreement])
        for temperature, requests in texts.items():
            pairs: dict[str, list[Pair]] = {}
            for prompt, answer, seed, name in track(
                requests, f"draft of {agreement}", console=Console(stderr=True)
            ):
                expect = exit_choosers(target, exits, temperature, seed) if target and exits else None
                pair = recorded(prompt, answer, chooser(model, temperature, seed), expect)
                pairs.setdefault(name, []).append(pair)
            for name, of in pairs.items():
                agreed = float(np.concatenate([pair.ranks() == 0 for pair in of]).mean())
                out = given.out / f"{name}-{agreement}-t{temperature:g}.npz"
                save(out, of, load=name, agreement=round(agreed, 2), temperature=temperature, **what)
                print(out.name, f"agreement {agreed:.3f}", sum(map(len, of)), "tokens", flush=True)


if __name__ == "__main__":
    main()
