"""Predicts the outcomes that a verification may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sglang_patches.drafting.draft import Draft


class Guess(NamedTuple):
    """The target's own token after the accepted path that ends at `parent`. probability: that it comes so."""

    parent: int
    token: int
    probability: float


class Prediction(NamedTuple):
    """What is known of a verification's outcome. guesses: the likeliest outcomes. unknown: verified nodes that the draft model should
    run for better guesses, which compete with the drafter's leaves. The value of such a node is the probability that the verification
    ends at it, and 1 where nothing can be guessed without it."""

    guesses: list[Guess]
    unknown: dict[int, float]


class OutcomePredictor(ABC):
    @abstractmethod
    def predict(self, draft: Draft, budget: int) -> Prediction:
        """The outcomes of `draft.verifying`, at most `budget` of them, by what is known now. Asked for again when `basis` has changed:
        the guesses then take the place of those before."""

    def basis(self, draft: Draft) -> Hashable:
        """What a prediction rests on: by default, how many of the nodes where the verification may end the draft model has run."""
        return sum(node in draft.candidates for node in draft.ends)

    def learn(self, draft: Draft, path: Sequence[int], tokens: Sequence[int]) -> None:  # noqa: B027 - may be nothing
        """Called with each outcome, before the draft moves on. path: the trie's nodes that carry the first of the tokens."""
