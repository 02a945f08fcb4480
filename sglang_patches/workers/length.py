"""Speculation length: how many rows a request verifies in this step.

SSSD section 3.2 picks batch x rows at the hardware's ridge point. Here the linear layers, timed once at start over growing
rows, say what rows not yet tried would add to a step; measured step times and the acceptance seen so far
decide: the width with the most expected tokens a second wins, and 1 (no draft) is an allowed answer.
"""

from __future__ import annotations

import functools
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from datastore_service.engine.tree import DraftTree, Tier

CANDIDATE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FIRST = 1  # steps of a (batch, width) that are not counted
TRUSTED = 3  # steps before a cell's own time replaces the prediction
SLOWEST_GAIN = 0.1  # of a cell with many ratios
NEW_GAIN = 0.3  # of a cell with few
LARGEST_ERROR = (
    0.7  # of a logarithm, in a known cell's ratio: a step that took ten times as long was disturbed
)
PACE_WEIGHT = 0.2  # of the newest step in the pace
STALE_STEPS = 400  # in which a cell that is not visited loses OPTIMISM of its time
OPTIMISM, MOST_STALE = 0.9, 3
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
    """How long decode steps take by (batch, width), relative to one another: measured, before that predicted.

    A machine's pace changes within seconds (clocks, neighbours, growing contexts), and a choice between an old time of one
    width and a new time of another would follow that. So what is learned is the *ratio* of two cells, from steps that
    follow each other, whose pace is the same. Only a cell that is new is placed by the pace of the steps before it.

    linear_seconds: rows -> seconds of the target's linear layers over that many rows (see measure_row_seconds).
    """

    def __init__(self, linear_seconds: Callable[[float], float]) -> None:
        self._linear_seconds = functools.lru_cache(maxsize=None)(linear_seconds)
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._steps = 0
        self._pace = 0.0  # logarithm of how slow the latest steps were against their cells
        self._last: tuple[_Cell, float] | None = None

    def observe(self, batch: int, width: int, seconds: float) -> None:
        self._steps += 1
        cell = self._cells.setdefault((batch, width), _Cell())
        cell.seen, cell.newest = cell.seen + 1, self._steps
        took = math.log(seconds)
        if cell.seen <= FIRST:  # a shape's first step also makes what later ones reuse
            self._last = None
            return
        if cell.seen == FIRST + 1:
            cell.level = took - self._pace
        elif self._last is not None and self._last[0] is not cell:
            _settle(cell, self._last[0], took - self._last[1])
        self._pace += PACE_WEIGHT * (took - cell.level - self._pace)
        self._last = cell, took

    def interrupted(self) -> None:
        """The next step does not follow the last one: their paces may differ."""
        self._last = None

    def seconds(self, batch: int, widths: Sequence[int]) -> list[float]:
        """Of steps with this batch, one for each width, in units that all cells share."""
        known = {key: self._estimate(cell) for key, cell in self._cells.items() if cell.seen >= TRUSTED}
        by_rows = sorted((size * width, took) for (size, width), took in known.items())
        return [
            known[batch, width] if (batch, width) in known else self._predicted(batch * width, by_rows)
            for width in widths
        ]

    def _estimate(self, cell: _Cell) -> float:
        """A cell that was not visited for long looks a little cheaper, so that an unlucky estimate is tried again."""
        age = self._steps - cell.newest
        return math.exp(cell.level) * OPTIMISM ** min(age / STALE_STEPS, MOST_STALE)

    def _predicted(self, rows: int, known: list[tuple[int, float]]) -> float:
        """Between the nearest known row counts on either side; beyond them, as the linear layers go on."""
        if not known:
            return self._linear_seconds(rows)
        place = bisect_left(known, (rows, 0.0))
        if 0 < place < len(known):
            (below, took_below), (above, took_above) = known[place - 1], known[place]
            return took_below + (took_above - took_below) * (rows - below) / max(above - below, 1)
        near, took = known[min(place, len(known) - 1)]
        difference = self._linear_seconds(rows) - self._linear_seconds(near)
        return max(took + difference, took * min(1.0, rows / near))


class _Cell:
    """level: logarithm of its time. seen, newest: its steps, and the number of the last one. ratios: learned ones."""

    __slots__ = ("level", "newest", "ratios", "seen")

    def __init__(self) -> None:
        self.level, self.seen, self.newest, self.ratios = 0.0, 0, 0, 0

    @property
    def gain(self) -> float:
        """How far one more ratio moves it: a mean at first, then one that forgets."""
        return max(1.0 / (self.ratios + 1), SLOWEST_GAIN)


def _settle(cell: _Cell, other: _Cell, difference: float) -> None:
    """Moves two levels towards an observed difference, the less known one further."""
    error, gain = difference - (cell.level - other.level), max(cell.gain, other.gain)
    if gain < NEW_GAIN:
        error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
    share = cell.gain / (cell.gain + other.gain)
    cell.level += gain * error * share
    other.level -= gain * error * (1.0 - share)
    cell.ratios, other.ratios = cell.ratios + 1, other.ratios + 1


class LengthPolicy:
    """Chooses each step's width and learns from its outcome. widths: allowed values, ascending."""

    def __init__(self, widths: Sequence[int], linear_seconds: Callable[[float], float]) -> None:
        self.widths = tuple(widths)
        self.times = StepTimes(linear_seconds)
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
        width = self._most_per_second(tokens, batch, self._useful(longest))
        self._plain_streak[batch] = self._plain_streak[batch] + 1 if width == 1 else 0
        return width

    def _most_per_second(self, tokens: np.ndarray, batch: int, widths: list[int]) -> int:
        """tokens: expected of a step, by width - 1 up to the largest tree's."""
        if len(widths) == 1:  # nothing to compare: no draft, or a width that is fixed
            return widths[0]
        seconds = np.array(self.times.seconds(batch, widths))
        seconds[1:] *= MARGIN
        expected = tokens[np.minimum(widths, len(tokens)) - 1]
        return widths[int(np.argmax(expected / seconds))]

    def _useful(self, longest: int) -> list[int]:
        """Widths up to the first that holds the largest tree: wider ones would verify padding."""
        enough = next((w for w in self.widths if w >= longest), self.widths[-1])
        return [w for w in self.widths if w <= enough]

    def step_started(self, batch: int, width: int, comparable: bool = True) -> tuple[int, int, float] | None:
        """Called when a decode step's forward is launched: the time since the last launch is that step's time.
        comparable: False when something else ran in between (a prefill, an idle gap). Returns the last step's batch, width
        and seconds if they count."""
        now = time.perf_counter()
        finished = None
        if not comparable:
            self.times.interrupted()
        elif self._started is not None:
            started, last_batch, last_width = self._started
            finished = last_batch, last_width, now - started
            self.times.observe(*finished)
        self._started = (now, batch, width)
        return finished

    def interrupted(self) -> None:
        """The next step's time since the last one would not be a decode step's."""
        self._started = None
        self.times.interrupted()
