"""Pairs of a target and a draft model: what the target says, and the draft model's choices at each of its tokens.

A file of pairs (.npz) holds `tokens` int32 [N], `choices` int32 [N, C], `probabilities` float32 [N, C] of all answers one after the
other, and `ends` int64 [answers], the end of each; `prompts` int32 [M] and `prompt_ends` int64 [answers] likewise. Choices are the
likeliest first, as the draft model would draw them. `exit_L` int32 [N, E] and `exit_L_probabilities` float32 [N, E] are those of the
target's early exit after L layers, if there is one. What the pairs are is said in fields of their own, numbers and words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

CHOICES = 64
VOCABULARY = 50_000  # of a synthetic pair
Choose = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # of the tokens of a text
_FIELDS = ("tokens", "choices", "probabilities")


@dataclass(frozen=True, eq=False)
class Pair:
    """One answer. prompt: int32 [m]. tokens: int32 [n], the target's. choices: int32 [n, C], the draft model's in place of each, if
    all before it are the target's. probabilities: float32 [n, C]. exits: choices int32 [n, E] and probabilities float32 [n, E] of
    the target's early exits, by the layers below them."""

    prompt: np.ndarray
    tokens: np.ndarray
    choices: np.ndarray
    probabilities: np.ndarray
    exits: Mapping[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def ranks(self) -> np.ndarray:
        """int64 [n]: which choice the target's token is, C if none."""
        found = self.choices == self.tokens[:, None]
        return np.where(found.any(1), found.argmax(1), self.choices.shape[1])


def recorded(
    prompt: Sequence[int], output: Sequence[int], choose: Choose, exits: Mapping[int, Choose] | None = None
) -> Pair:
    """An answer as the draft model sees it. choose: int32 tokens [n] -> the draft model's choices for the next token after each, best
    first, int [n, C], and their probabilities, float [n, C]; after the request's temperature and filters, and in the order of the
    noise that it shares with the target, if it has any. exits: the same of early exits, by layer."""
    text, begin = np.array([*prompt, *output], np.int32), len(prompt)

    def of_answer(choose: Choose) -> tuple[np.ndarray, np.ndarray]:
        choices, probabilities = (found[begin - 1 : -1, :CHOICES] for found in choose(text))
        return choices.astype(np.int32), probabilities.astype(np.float32)

    found = {layer: of_answer(expect) for layer, expect in (exits or {}).items()}
    return Pair(text[:begin], text[begin:], *of_answer(choose), found)


def save(path: Path, pairs: Sequence[Pair], **what: float | str) -> None:
    """what: says what the pairs are."""
    fields = {name: np.concatenate([getattr(pair, name) for pair in pairs]) for name in _FIELDS}
    for layer in pairs[0].exits:
        for name, arrays in zip(
            _exit_fields(layer), zip(*(pair.exits[layer] for pair in pairs), strict=True), strict=True
        ):
            fields[name] = np.concatenate(arrays)
    prompts = np.concatenate([pair.prompt for pair in pairs])
    ends, prompt_ends = np.cumsum([(len(pair), len(pair.prompt)) for pair in pairs], axis=0).T
    np.savez_compressed(path, **fields, ends=ends, prompts=prompts, prompt_ends=prompt_ends, **what)


def load(path: Path) -> tuple[list[Pair], Mapping[str, float | str]]:
    """The pairs, and what they are. Raises ValueError for a file that is no file of pairs."""
    with np.load(path) as file:
        found = dict(file)
    missing = {*_FIELDS, "ends", "prompts", "prompt_ends"} - set(found)
    if missing:
        raise ValueError(f"{path}: no field {min(missing)}")
    prompts = np.split(found.pop("prompts"), found.pop("prompt_ends")[:-1])
    ends = found.pop("ends")[:-1]
    fields = [np.split(found.pop(name), ends) for name in _FIELDS]
    layers = sorted(
        int(name.split("_")[1]) for name in found if name.startswith("exit_") and name.count("_") == 1
    )
    exits: list[dict] = [{} for _ in prompts]
    for layer in layers:
        parts = (np.split(found.pop(name), ends) for name in _exit_fields(layer))
        for of, *arrays in zip(exits, *parts, strict=True):
            of[layer] = tuple(arrays)
    what = {name: value.item() for name, value in found.items()}
    return [Pair(*of) for of in zip(prompts, *fields, exits, strict=True)], what


def _exit_fields(layer: int) -> tuple[str, str]:
    return f"exit_{layer}", f"exit_{layer}_probabilities"


def synthetic(
    rng: np.random.Generator, length: int, acceptance: float, exponent: float, first: float
) -> Pair:
    """The first choice is right with probability `acceptance`. Where it is not, F others miss with probability (1 - first) F^-r:
    Definition 11, whose F^-r alone would let the second choice always miss. exponent: r."""
    ranks = np.where(
        rng.random(length) < acceptance,
        0,
        np.maximum(1, np.ceil(((1 - first) / (1 - rng.random(length))) ** (1 / exponent))),
    )
    tokens = rng.integers(0, VOCABULARY, length, dtype=np.int32)
    others = 1 + np.arange(CHOICES, dtype=np.int32)
    choices = (tokens[:, None] + others) % VOCABULARY
    rows = np.flatnonzero(ranks < CHOICES)
    choices[rows, ranks[rows].astype(int)] = tokens[rows]
    misses = np.append(1.0, (1 - first) * np.arange(1, CHOICES) ** -exponent)
    by_rank = np.append(acceptance, (1 - acceptance) * -np.diff(misses))
    begin = np.zeros(1, np.int32)
    return Pair(begin, tokens, choices, np.broadcast_to(by_rank.astype(np.float32), choices.shape))


def half_remembered(pairs: Sequence[Pair], known: float) -> list[np.ndarray]:
    """int32. A copy of each synthetic text, of which each token is the right one with probability `known`, else any."""
    rng, copies = np.random.default_rng(0), []
    for pair in pairs:
        text = np.append(pair.prompt, pair.tokens)
        others = rng.integers(0, VOCABULARY, len(text), dtype=np.int32)
        copies.append(np.where(rng.random(len(text)) < known, text, others))
    return copies


def synthetic_pairs(
    count: int, length: int, acceptance: float, exponent: float, first: float, seed: int
) -> list[Pair]:
    return [
        synthetic(np.random.default_rng([seed, at]), length, acceptance, exponent, first)
        for at in range(count)
    ]
