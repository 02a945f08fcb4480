"""Speculation length: how many rows a request verifies in this step.

SSSD section 3.2 picks batch x rows at the hardware's ridge point. That is the start value here (the rows whose linear
layers cost little more than one row's, timed once at start); then measured step times and the acceptance seen so far
decide: the width with the most expected tokens a second wins, and 1 (no draft) is an allowed answer.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from datastore_service.engine.tree import DraftTree, Tier

CANDIDATE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
WINDOW = 15  # step times kept per (batch, width)
TRUSTED = 3  # measurements before a width's own time replaces the prediction
STALE_STEPS = 400  # after so many steps without a measurement a width may be tried again
PLAIN_STREAK = 16  # steps without a paying draft at a batch size before asking becomes rare
PROBE_STEPS = 32
# By which a draft must promise to beat a plain step: the largest of noisy estimates is too large.
MARGIN = 1.05
_BINS = 10
_BIN_WEIGHT = 20.0  # pseudo-observations behind the drafter's own estimate


class AcceptanceModel:
    """Turns a drafter's path probabilities into acceptance rates, per tier and probability bin, from what was seen."""

    def __init__(self) -> None:
        centres = (np.arange(_BINS) + 0.5) / _BINS
        tiers = max(Tier) + 1
        self._seen = np.full((tiers, _BINS), _BIN_WEIGHT)
        self._accepted = np.tile(centres * _BIN_WEIGHT, (tiers, 1))

    def estimate(self, tree: DraftTree) -> np.ndarray:
        """float64 [nodes]: estimated chance that each node is on the accepted path."""
        bins = self._bins(tree)
        return self._accepted[tree.sources, bins] / self._seen[tree.sources, bins]

    def observe(self, tree: DraftTree, accepted: np.ndarray) -> None:
        """accepted: bool [nodes], which verified nodes were on the accepted path."""
        bins = self._bins(tree)
        np.add.at(self._seen, (tree.sources, bins), 1.0)
        np.add.at(self._accepted, (tree.sources, bins), accepted.astype(np.float64))

    @staticmethod
    def _bins(tree: DraftTree) -> np.ndarray:
        return np.clip((tree.probs * _BINS).astype(np.int64), 0, _BINS - 1)


class StepTimes:
    """Seconds of a decode step by (batch, width): measured medians, before that a prediction from the row curve.

    curve: rows -> relative cost of the target's forward over that many rows (see measure_row_curve).
    """

    def __init__(self, curve: Callable[[float], float]) -> None:
        self._curve = curve
        self._samples: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._medians: dict[tuple[int, int], float] = {}  # of trusted samples; kept, as every step reads many
        self._last: dict[tuple[int, int], int] = {}
        self._steps = 0

    def observe(self, batch: int, width: int, seconds: float) -> None:
        self._steps += 1
        samples = self._samples[batch, width]
        samples.append(seconds)
        if len(samples) >= TRUSTED:
            self._medians[batch, width] = median(samples)
        self._last[batch, width] = self._steps

    def seconds(self, batch: int, width: int) -> float:
        key = batch, width
        if key in self._medians and self._steps - self._last[key] < STALE_STEPS:
            return self._medians[key]
        return self._predicted(batch, width)

    def _predicted(self, batch: int, width: int) -> float:
        """Between the nearest measured row counts on either side; beyond them, as the curve goes on."""
        rows = batch * width
        known = {key[0] * key[1]: seconds for key, seconds in self._medians.items() if key != (batch, width)}
        if not known:
            return self._curve(rows)
        below = max((count for count in known if count <= rows), default=None)
        above = min((count for count in known if count >= rows), default=None)
        if below is None or above is None:
            near = above if below is None else below
            return known[near] * self._curve(rows) / self._curve(near)
        return float(np.interp(rows, (below, above), (known[below], known[above])))


class LengthPolicy:
    """Chooses each step's width and learns from its outcome. widths: allowed values, ascending."""

    def __init__(self, widths: Sequence[int], curve: Callable[[float], float]) -> None:
        self.widths = tuple(widths)
        self.times = StepTimes(curve)
        self.acceptance = AcceptanceModel()
        self._started: tuple[float, int, int] | None = None
        self._plain_streak: dict[int, int] = defaultdict(int)

    def wants_draft(self, batch: int) -> bool:
        """False where drafts have not paid at this batch size lately: then even asking for them is saved."""
        streak = self._plain_streak[batch]
        return streak < PLAIN_STREAK or streak % PROBE_STEPS == 0

    def choose(self, trees: Sequence[DraftTree]) -> int:
        """The width with the most expected tokens a second for this batch's trees."""
        longest = max((len(tree) for tree in trees), default=0) + 1
        gains = np.zeros(longest)
        gains[0] = len(trees)
        for tree in trees:
            gains[1 : len(tree) + 1] += self.acceptance.estimate(tree)
        tokens, batch = np.cumsum(gains), len(trees)
        width = max(self._useful(longest), key=lambda w: self._promise(tokens[min(w, longest) - 1], batch, w))
        self._plain_streak[batch] = self._plain_streak[batch] + 1 if width == 1 else 0
        return width

    def _promise(self, tokens: float, batch: int, width: int) -> float:
        """Expected tokens a second."""
        margin = MARGIN if width > 1 else 1.0
        return tokens / (margin * self.times.seconds(batch, width))

    def _useful(self, longest: int) -> list[int]:
        """Widths up to the first that holds the largest tree: wider ones would verify padding."""
        enough = next((w for w in self.widths if w >= longest), self.widths[-1])
        return [w for w in self.widths if w <= enough]

    def step_started(self, batch: int, width: int, comparable: bool = True) -> None:
        """Called when a decode step's forward is launched: the time since the last launch is that step's time.
        comparable: False when something else ran in between (a prefill, an idle gap)."""
        now = time.perf_counter()
        if self._started is not None and comparable:
            started, last_batch, last_width = self._started
            self.times.observe(last_batch, last_width, now - started)
        self._started = (now, batch, width)

    def interrupted(self) -> None:
        """The next step's time since the last one would not be a decode step's."""
        self._started = None
