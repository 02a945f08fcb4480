"""The likeliest outcomes of a verification, wherever they end."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sglang_patches.draft_side.draft import Candidates
from sglang_patches.draft_side.seams import Guess
from sglang_patches.methods.planner.confidence import ConfidenceRates
from sglang_patches.methods.saguaro import GeometricFanOut
from sglang_patches.methods.saguaro.fan_out import RANKS, End


class LikeliestOutcomes(GeometricFanOut):
    """Predicts the likeliest outcomes by the measured rates of the draft model's choices. With SAGUARO's power law this is its Theorem
    12, with measured rates its Theorem 18; no exponent is needed."""

    def __init__(self) -> None:
        super().__init__()
        self._confidence = ConfidenceRates(RANKS)

    def learn_choice(self, candidates: Candidates, rank: int) -> None:
        super().learn_choice(candidates, rank)
        self._confidence.learn(candidates.probabilities[:RANKS], rank)

    def rates_of(self, candidates: Candidates) -> list[float]:
        rates, probabilities = self.rates, candidates.probabilities[:RANKS]
        found = rates.copy()
        found[: len(probabilities)] = self._confidence.rates(probabilities, rates[: len(probabilities)])
        return found.tolist()

    def guesses(self, ends: Sequence[End], budget: int) -> list[Guess]:
        found = (
            Guess(end.node, token, end.reached * rate) for end in ends for rate, token in end.choices[:budget]
        )
        return heapq.nlargest(budget, found, key=lambda guess: guess.probability)
