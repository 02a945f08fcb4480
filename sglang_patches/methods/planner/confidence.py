"""How often a choice of the draft model is the target's own token, by its rank and by how sure the draft model is of it."""

from __future__ import annotations

import numpy as np

from sglang_patches.ledger.rates import RateTable

MEMORY = 4000  # a cell follows its last so many choices
_PRIOR = 20.0  # pseudo-observations of a cell
# Of the draft model's probability. Narrow where it is sure, for what it repeats for many tokens.
_EDGES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995])


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
