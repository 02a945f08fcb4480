"""One best-first planner in place of K, F, gamma and theta: the draft model is run where that is worth the most for its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from sglang_patches.draft_side.draft import Candidates
from sglang_patches.draft_side.seams import Grown, Guess, RowChoice
from sglang_patches.ledger.rates import RateTable
from sglang_patches.methods.saguaro import RANKS, End, GeometricFanOut, Rollouts

MEMORY = 4000  # a cell follows its last so many choices
_PRIOR = 20.0  # pseudo-observations of a cell
# Of the draft model's probability. Narrow where it is sure, for what it repeats for many tokens.
_EDGES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995])


MOST, LEAST = 3, 0.05  # children of a node; probability of any but the first
FORWARD_MEMORY = 0.98  # weight of a forward's time after the next one


class ConfidenceRates:
    """Ranks share a row of cells as `bit_length` counts: 0, 1, 2 to 3, 4 to 7, and so on. ranks: how many there are."""

    def __init__(self, ranks: int) -> None:
        self._classes = np.array([rank.bit_length() for rank in range(ranks)])
        shape = self._classes[-1] + 1, len(_EDGES) + 1
        self._table = RateTable(np.zeros(shape), 0.0, MEMORY)

    def rates(self, probabilities: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """float64 [n]: of the first n choices. probabilities, prior: float [n], the draft model's, and what is believed of their
        ranks."""
        return self._table.rates(self._cells(probabilities), _PRIOR, prior)

    def learn(self, probabilities: np.ndarray, rank: int) -> None:
        """Learns which of the choices was the target's own token.

        rank: which of the choices came; none if there is none of that rank.
        """
        self._table.learn(self._cells(probabilities), np.arange(len(probabilities)) == rank)

    def _cells(self, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._classes[: len(probabilities)], np.searchsorted(_EDGES, probabilities)


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


class Branches(Rollouts):
    """A tree after every start. A leaf's value is the probability of the path down to it, so the likeliest are run first, wherever they
    are.

    rates_of: how often each of a node's candidates is the target's token.
    """

    def __init__(self, lookahead: int, rates_of: Callable[[Candidates], Sequence[float]]) -> None:
        super().__init__(lookahead)
        self._rates_of = rates_of

    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        likeliest = zip(candidates.tokens[:MOST].tolist(), self._rates_of(candidates), strict=False)
        return [
            Grown(node, token, rate)
            for rank, (token, rate) in enumerate(likeliest)
            if not rank or rate >= LEAST
        ]


class RowsByValue(RowChoice):
    """The number with the most value a second. A forward's time is learned as a line over its rows.

    A row's value is the probability that the target needs what the row gives: the expected tokens that it adds to a draft.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of weights, rows, seconds, rows squared, rows times seconds

    def rows(self, values: np.ndarray) -> int:
        counts = np.arange(1, len(values) + 1)
        return int(np.argmax(np.cumsum(values) / self.seconds(counts))) + 1

    def room(self, rows: int, leaves: int, ends: int) -> int:
        """Proposals compete with leaves."""
        return max(1, rows // max(1, ends))

    def took(self, rows: int, seconds: float) -> None:
        self._sums = FORWARD_MEMORY * self._sums + (1.0, rows, seconds, rows * rows, rows * seconds)

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        """float64, estimated time of a forward over so many rows. Until two sizes are known it does not depend on them."""
        weight, mean_rows, mean_seconds, squares, products = self._sums
        if not weight:
            return np.ones(len(rows))
        mean_rows, mean_seconds = mean_rows / weight, mean_seconds / weight
        spread = squares / weight - mean_rows**2
        slope = (products / weight - mean_rows * mean_seconds) / spread if spread > 1e-9 else 0.0
        slope = min(
            max(slope, 0.0), mean_seconds / mean_rows
        )  # more rows never take less, and none takes no time
        return mean_seconds + slope * (rows - mean_rows) + 1e-9
