"""Pairs of a target and a draft model: what the target says, and the draft model's choices at each of its tokens.

A file of pairs (.npz) holds `tokens` int32 [N], `choices` int32 [N, C], `probabilities` float32 [N, C] of all answers one after the
other, and `ends` int64 [answers], the end of each. Choices are the likeliest first, as the draft model would draw them. It may
hold the prompts: `prompts` int32 [M], one after the other, and `prompt_ends` int64 [answers].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

CHOICES = 64
VOCABULARY = 50_000  # of a synthetic pair
BEGIN = 0  # the token before an answer whose prompt is not known


@dataclass(frozen=True, eq=False)
class Pair:
    """One answer. tokens: int32 [n], the target's. choices: int32 [n, C], the draft model's in place of each, if all before it are
    the target's. probabilities: float32 [n, C]. prompt: int32, what the answer follows."""

    tokens: np.ndarray
    choices: np.ndarray
    probabilities: np.ndarray
    prompt: np.ndarray = field(default_factory=lambda: np.array([BEGIN], np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def ranks(self) -> np.ndarray:
        """int64 [n]: which choice the target's token is, C if none."""
        found = self.choices == self.tokens[:, None]
        return np.where(found.any(1), found.argmax(1), self.choices.shape[1])


def recorded(
    prompt: Sequence[int], output: Sequence[int], distributions: Callable[[np.ndarray], np.ndarray]
) -> Pair:
    """An answer as the draft model sees it. distributions: int32 tokens [n] -> probabilities of the next token after each, float32
    [n, vocabulary]; after the request's temperature and filters, and with the noise that it shares with the target, if it has any."""
    text = np.array([*prompt, *output], np.int32)
    found = distributions(text)[len(prompt) - 1 : -1]
    choices = np.argsort(-found, axis=1, kind="stable")[:, :CHOICES].astype(np.int32)
    chances = np.take_along_axis(found, choices, 1).astype(np.float32)
    return Pair(text[len(prompt) :], choices, chances, text[: len(prompt)])


def save(path: Path, pairs: Sequence[Pair]) -> None:
    fields = {
        name: np.concatenate([getattr(pair, name) for pair in pairs])
        for name in ("tokens", "choices", "probabilities")
    }
    np.savez_compressed(
        path,
        **fields,
        ends=np.cumsum([len(pair) for pair in pairs]),
        prompts=np.concatenate([pair.prompt for pair in pairs]),
        prompt_ends=np.cumsum([len(pair.prompt) for pair in pairs]),
    )


def load(path: Path) -> list[Pair]:
    """Raises ValueError for a file that is no file of pairs."""
    with np.load(path) as file:
        missing = {"tokens", "choices", "probabilities", "ends"} - set(file.files)
        if missing:
            raise ValueError(f"{path}: no field {min(missing)}")
        fields = [np.split(file[name], file["ends"][:-1]) for name in ("tokens", "choices", "probabilities")]
        if "prompts" in file.files:
            fields.append(np.split(file["prompts"], file["prompt_ends"][:-1]))
    return [Pair(*of) for of in zip(*fields, strict=True)]


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
    return Pair(tokens, choices, np.broadcast_to(by_rank.astype(np.float32), choices.shape))


def synthetic_pairs(
    count: int, length: int, acceptance: float, exponent: float, first: float, seed: int
) -> list[Pair]:
    return [
        synthetic(np.random.default_rng([seed, at]), length, acceptance, exponent, first)
        for at in range(count)
    ]
