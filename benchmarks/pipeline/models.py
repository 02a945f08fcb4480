"""What models say: a target's answers, and the choices of draft models and early exits in place of each of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.pipeline.pairs import CHOICES, Choose, Pair, recorded
from benchmarks.traces import Trace
from sglang_patches.demo.model import ensure
from sglang_patches.demo.noise import add_noise
from sglang_patches.early_exit.file import EarlyExits
from sglang_patches.verification.shared_noise import NO_NOISE, best

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXIT_CHOICES = 8  # that are kept of an early exit


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
        given = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
        found = model(ids, **given, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
        ids = drawn(found.logits[:, -1], temperature, seed, lengths + step, 1)[0]
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        out.append(ids)
    rows = torch.cat(out, 1).tolist()
    return [row[: row.index(ends) + 1] if ends in row else row for row in rows]


@torch.inference_mode()
def logits(model: PreTrainedModel, text: np.ndarray) -> torch.Tensor:
    """float32 [tokens, vocabulary]: of the next token after each."""
    return model(torch.from_numpy(text[None].astype(np.int64))).logits[0]


def choices(of: torch.Tensor, temperature: float, seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The best tokens and their probabilities by the logits after each token of a text."""
    positions = torch.arange(len(of)) + 1
    seeds = torch.full_like(positions, seed)
    tokens, chances = drawn(of, temperature, seeds, positions, min(count, of.shape[-1]))
    return tokens.numpy(), chances.numpy()


def chooser(model: PreTrainedModel, temperature: float = 0.0, seed: int = 0) -> Choose:
    """The model's choices after each token of a text."""
    return lambda text: choices(logits(model, text), temperature, seed, CHOICES)


def exit_choosers(
    model: PreTrainedModel, exits: EarlyExits, temperature: float = 0.0, seed: int = 0
) -> dict[int, Choose]:
    """What the target's early exits expect after each token of a text, by layer."""

    @lru_cache(1)
    @torch.inference_mode()
    def states(text: bytes) -> tuple[torch.Tensor, ...]:
        ids = torch.from_numpy(np.frombuffer(text, np.int32).astype(np.int64))
        return model(ids[None], output_hidden_states=True).hidden_states

    @torch.inference_mode()
    def expect(layer: int, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        adapted = exits.adapters[layer](states(text.tobytes())[layer][0])
        of = torch.nn.functional.linear(adapted, model.get_output_embeddings().weight)
        return choices(of, temperature, seed, EXIT_CHOICES)

    return {layer: partial(expect, layer) for layer in exits.adapters}


def own_answer(target: PreTrainedModel, trace: Trace) -> np.ndarray:
    """int32: the target's greedy answer, as long as the recorded one. That one may be of another precision. Only what follows their
    first difference is generated."""
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


def pairs_of(
    target: PreTrainedModel, draft: PreTrainedModel, traces: Iterable[Trace], exits: EarlyExits | None = None
) -> Iterator[Pair]:
    expect = exit_choosers(target, exits) if exits else None
    for trace in traces:
        yield recorded(trace.prompt.tolist(), own_answer(target, trace).tolist(), chooser(draft), expect)
