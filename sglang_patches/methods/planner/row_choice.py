"""How many rows a draft forward has: as many as are worth their time."""

from __future__ import annotations

import numpy as np

from sglang_patches.draft_side.seams import RowChoice

MEMORY = 0.98  # weight of a forward's time after the next one


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
        self._sums = MEMORY * self._sums + (1.0, rows, seconds, rows * rows, rows * seconds)

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
