"""How often the datastore's proposals come true."""

from __future__ import annotations

import numpy as np

MEMORY = 4000  # the counts follow the last so many proposals
_PRIOR = 4.0  # pseudo-observations of each class, before the first
_TRUST = 0.5  # the first rate, over the datastore's estimate
_BINS = 5  # of the datastore's estimate
# Classes of a token's rank among the draft model's choices: 0, 1, 2 to 3, 4 to 7, and so on, as `bit_length` counts.
_CLASSES = 7


class HintRates:
    """Learns how often a token that the datastore proposes at a verified node is the target's own: by its rank among the draft
    model's choices there, and by the datastore's estimate."""

    def __init__(self) -> None:
        centres = (np.arange(_BINS) + 0.5) / _BINS
        self._seen = np.full((_CLASSES, _BINS), _PRIOR)
        self._came = np.tile(_PRIOR * _TRUST * centres, (_CLASSES, 1))

    def rate(self, rank: int, estimate: float) -> float:
        """In 0 to 1. rank: from 0 on. estimate: the datastore's, in 0 to 1."""
        of = self._class(rank, estimate)
        return float(self._came[of] / self._seen[of])

    def learn(self, rank: int, estimate: float, came: bool) -> None:
        of = self._class(rank, estimate)
        self._seen[of] += 1
        self._came[of] += came
        if self._seen[of] > MEMORY:
            self._seen[of] /= 2
            self._came[of] /= 2

    @staticmethod
    def _class(rank: int, estimate: float) -> tuple[int, int]:
        return min(rank.bit_length(), _CLASSES - 1), min(int(estimate * _BINS), _BINS - 1)
