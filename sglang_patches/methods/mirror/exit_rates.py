"""How often an early exit's choices come true."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MEMORY = 4000  # a cell follows its last so many choices
_PRIOR = 4.0  # pseudo-observations of a cell: the exit's probability is right of its first choice, and the less of one the lower its rank
_BINS = 5  # of the exit's probability
_CLASSES = 7  # of a rank: 0, 1, 2 to 3, 4 to 7, and so on, as `bit_length` counts


class Choice(NamedTuple):
    """One of an early exit's choices. rank: among them, from 0 on. draft_rank: the same token's among the draft model's choices.
    probability: the exit's."""

    rank: int
    draft_rank: int
    probability: float


class ExitRates:
    """Learns how often such choices are the target's own token."""

    def __init__(self) -> None:
        centres = (np.arange(_BINS) + 0.5) / _BINS
        by_rank = np.multiply.outer(0.5 ** np.arange(_CLASSES), centres)
        self._came = np.repeat(_PRIOR * by_rank[:, None], _CLASSES, axis=1)
        self._seen = np.full_like(self._came, _PRIOR)

    def rate(self, choice: Choice) -> float:
        """In 0 to 1."""
        of = _cell(choice)
        return float(self._came[of] / self._seen[of])

    def learn(self, choice: Choice, came: bool) -> None:
        of = _cell(choice)
        self._seen[of] += 1
        self._came[of] += came
        if self._seen[of] > MEMORY:
            self._seen[of] /= 2
            self._came[of] /= 2


def _cell(choice: Choice) -> tuple[int, int, int]:
    rank, draft_rank = (min(of.bit_length(), _CLASSES - 1) for of in (choice.rank, choice.draft_rank))
    return rank, draft_rank, min(int(choice.probability * _BINS), _BINS - 1)
