"""Predicts the outcomes that a verification may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.drafter import Leaf


class Guess(NamedTuple):
    """The target's own token after the accepted path that ends at `parent`. probability: that it comes so."""

    parent: int
    token: int
    probability: float


class OutcomePredictor(ABC):
    @abstractmethod
    def guesses(self, draft: Draft, budget: int) -> list[Guess]:
        """The likeliest outcomes of `draft.verifying`, at most `budget`. No candidates that it needs are `missing`."""

    def more(self, draft: Draft, budget: int) -> list[Guess]:
        """Further outcomes, now that something is drafted after the first: asked for in every round until the outcome. budget: what
        is left of it."""
        return []

    def missing(self, draft: Draft) -> list[int]:
        """Nodes whose candidates have to be known before it can guess, as far as that is known; by default all where the
        verification may end."""
        return draft.missing()

    def unknown_ends(self, draft: Draft) -> list[Leaf]:
        """Verified nodes whose candidates are not known and need not be `missing`. A leaf's value is the probability that the
        verification ends at it. They compete with the drafter's leaves."""
        return []

    def learn(self, draft: Draft, path: Sequence[int], tokens: Sequence[int]) -> None:  # noqa: B027 - may be nothing
        """Called with each outcome, before the draft moves on. path: the trie's nodes that carry the first of the tokens."""
