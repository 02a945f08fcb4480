"""Drafting in rounds, played token by token: the process of DOUBLE's appendix B.1, with coins for the two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.pipeline.theory.parallel import NO_RETRIEVAL

LastRound = Literal["refused", "like any other"]


@dataclass(frozen=True)
class Cycles:
    """One entry a cycle, of shape (count,). time: in draft forwards. ratio: C, draft forwards in the time of a target's."""

    rounds: np.ndarray
    tokens: np.ndarray
    time: np.ndarray
    ratio: float

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return float(self.tokens.sum() * self.ratio / self.time.sum())

    def errors_from(self, speedup: float) -> float:
        """How far the measured speed-up is above this one, in standard errors."""
        return standard_errors(self.tokens * self.ratio - speedup * self.time, 0.0)


def standard_errors(samples: np.ndarray, expected: float) -> float:
    """How far the mean of the samples is above what is expected."""
    return float((samples.mean() - expected) / (samples.std() / np.sqrt(len(samples))))


def accepted(rng: np.random.Generator, acceptance: float, drafted: np.ndarray) -> np.ndarray:
    """Tokens before the first refusal in each of the rounds, which have so many drafted tokens."""
    places = np.arange(drafted.max())
    right = (rng.random((len(drafted), len(places))) < acceptance) & (places < drafted[:, None])
    return np.cumprod(right, axis=1).sum(axis=1)


def sequential_cycles(
    acceptance: float, gamma: int, ratio: float, last: LastRound = "refused", count: int = 20_000
) -> Cycles:
    """The draft model drafts gamma tokens, then the target verifies them and adds one of its own."""
    rng, cycles = np.random.default_rng(0), _started(count, ratio)
    going = np.arange(count)
    while len(going):
        drafted = np.full(len(going), gamma)
        right, refused = _verified(rng, acceptance, drafted, last)
        cycles.rounds[going] += 1
        cycles.tokens[going] += right + 1
        cycles.time[going] += gamma + ratio
        going = going[~refused]
    return cycles


def parallel_cycles(
    acceptance: float,
    gamma: int,
    ratio: float,
    matched: Sequence[float] = NO_RETRIEVAL,
    last: LastRound = "refused",
    bonus: Sequence[float] = NO_RETRIEVAL,
    count: int = 20_000,
) -> Cycles:
    """The draft model drafts a round while the target verifies the one before; both start a round together.

    matched, bonus: probabilities of 0, 1, 2 and so on retrieved tokens in a draft forward, and behind the target's own token.
    """
    rng, cycles = np.random.default_rng(0), _started(count, ratio)
    drafted_at, verified_at = np.full(count, float(gamma)), np.zeros(count)
    going = np.arange(count)
    while len(going):
        drafted = gamma + rng.choice(len(matched), (len(going), gamma), p=matched).sum(axis=1)
        right, refused = _verified(rng, acceptance, drafted, last)
        begun = np.maximum(drafted_at[going], verified_at[going])
        drafted_at[going], verified_at[going] = begun + gamma, begun + ratio
        cycles.rounds[going] += 1
        cycles.tokens[going] += right + refused
        going = going[~refused]
    cycles.tokens[:] += rng.choice(len(bonus), count, p=bonus)
    cycles.time[:] = verified_at
    return cycles


def _started(count: int, ratio: float) -> Cycles:
    rounds, tokens, time = np.zeros((3, count))
    return Cycles(rounds, tokens, time, ratio)


def _verified(
    rng: np.random.Generator, acceptance: float, drafted: np.ndarray, last: LastRound
) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens of each round, and whether it ends the cycle. A last round that is like any other is drawn again once it is
    known to be the last, and may then be accepted as a whole."""
    right = accepted(rng, acceptance, drafted)
    refused = right < drafted
    if last == "like any other" and refused.any():
        right[refused] = accepted(rng, acceptance, drafted[refused])
    return right, refused
