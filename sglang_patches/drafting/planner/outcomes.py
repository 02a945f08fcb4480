"""The likeliest outcomes of a verification, wherever they end."""

from __future__ import annotations

from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.predictor import Guess
from sglang_patches.drafting.saguaro import GeometricFanOut


class LikeliestOutcomes(GeometricFanOut):
    """By the measured rates of the draft model's choices. With SAGUARO's power law this is its Theorem 12, with measured rates its
    Theorem 18; no exponent is needed."""

    def guesses(self, draft: Draft, budget: int) -> list[Guess]:
        found = [
            Guess(end.node, token, end.reached * rate)
            for end in self._ends(draft)
            for rate, token in end.choices[:budget]
        ]
        return sorted(found, key=lambda guess: -guess.probability)[:budget]
