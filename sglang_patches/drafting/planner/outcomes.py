"""The likeliest outcomes of a verification, wherever they end."""

from __future__ import annotations

import math

from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.drafter import Leaf
from sglang_patches.drafting.planner.confidence import ConfidenceRates
from sglang_patches.drafting.predictor import Guess
from sglang_patches.drafting.saguaro import GeometricFanOut
from sglang_patches.drafting.saguaro.fan_out import RANKS


class LikeliestOutcomes(GeometricFanOut):
    """By the measured rates of the draft model's choices. With SAGUARO's power law this is its Theorem 12, with measured rates its
    Theorem 18; no exponent is needed.

    It begins with the ends whose candidates are known, and has the others run where that is worth as much as drafting on: a tree of
    the datastore has ends that the draft model has never seen, and they must not delay the likely ones.
    """

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

    def missing(self, draft: Draft) -> list[int]:
        missing = draft.missing()
        return missing if len(missing) == 1 + len(draft.verifying or ()) else []

    def unknown_ends(self, draft: Draft) -> list[Leaf]:
        return [Leaf(node, value) for node, value in draft.unknown.items() if node not in draft.candidates]

    def guesses(self, draft: Draft, budget: int) -> list[Guess]:
        return self._likeliest(draft, budget)

    def more(self, draft: Draft, budget: int) -> list[Guess]:
        if self.known(draft).keys().isdisjoint(draft.unknown):
            return []
        return self._likeliest(draft, budget + len(draft.starts))

    def _likeliest(self, draft: Draft, budget: int) -> list[Guess]:
        """What is not drafted for yet, up to the share of the budget that the known ends are of all that is likely."""
        ends, known = self._ends(draft), self.known(draft)
        draft.unknown = {end.node: end.ends for end in ends if end.node not in known}
        likely = sum(end.ends for end in ends)
        share = sum(end.ends for end in ends if end.node in known) / max(1e-9, likely)
        left = math.ceil(budget * share) - len(draft.starts)
        found = [
            Guess(end.node, token, end.reached * rate)
            for end in ends
            for rate, token in end.choices[:budget]
            if draft.trie.child(end.node, token) not in draft.starts
        ]
        return sorted(found, key=lambda guess: -guess.probability)[: max(0, left)]
