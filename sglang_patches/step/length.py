"""Speculation length: how many rows a request verifies in this step.

SSSD section 3.2 picks batch x rows at the hardware's ridge point. Here the times of the target's linear layers, measured once at
start, are the first guess of what more rows cost. The times of the steps correct the guess. The policy chooses the width with the
most expected tokens per second, given the acceptance seen so far. Width 1 (no draft) is allowed.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from datastore_service.protocol.tree import DraftTree
from sglang_patches.step.acceptance import Acceptance

CANDIDATE_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Drafted rows of a step in which each request has its own, an eighth apart at most: so shapes recur.
ROW_COUNTS = (*range(8), *(size << doubled for doubled in range(8) for size in range(8, 16)))
# Guessed costs of a step besides its linear layers, in units of the linear layers over one row: per step, per request, per
# row, per request with a draft (verification, moving KV).
STEP, REQUEST, ROW, DRAFT = 1.0, 0.1, 0.02, 0.05
SPREAD = 0.7  # standard deviation of a guess's logarithm
NOISE = 0.1  # standard deviation of the logarithm of two steps' ratio
OUTLIER = (
    2.0  # standard deviations at which an error is clipped: a step that took ten times as long was disturbed
)
DRIFT = 0.01  # change of a part's logarithm per ratio, as a standard deviation
PLAIN_STREAK = 16  # plain steps in a row at a batch size, after which the datastore is asked only every PROBE_STEPS steps
PROBE_STEPS = 8
STEADY_STEPS = 48  # steps of one kind in a row, after which another is tried
# Required predicted speed-up over a plain step. The largest of several noisy estimates is too large.
MARGIN = 1.1


class StepTimes:
    """Relative times of decode steps by (batch, rows): predicted, and corrected by measurements.

    A machine's speed changes within seconds (clocks, neighbours, growing contexts). A choice between an old time of so many rows and
    a new time of others would follow these changes. So the model learns from *ratios* of consecutive steps, which run at the
    same speed. There are many pairs of (batch, rows) and few ratios of each. So a ratio does not move a cell of a table. It moves
    the sizes of the parts that all steps are made of. Their logarithms are held as a normal distribution (an extended Kalman
    filter).

    linear_seconds: rows -> seconds of the target's linear layers over that many rows (see measure_row_seconds).
    """

    def __init__(self, linear_seconds: Callable[[float], float]) -> None:
        self._linear_seconds = linear_seconds
        parts = len(self._guessed_parts(1, 1))
        self._sizes = np.zeros(parts)  # logarithms, over the guesses
        self._covariance = SPREAD**2 * np.eye(parts)
        self._parts = functools.lru_cache(maxsize=None)(self._guessed_parts)
        self._last: tuple[tuple[int, int], float] | None = None
        self._known: set[tuple[int, int]] = set()

    def seconds(self, batch: int, rows: Sequence[int]) -> list[float]:
        """Time of a step with this batch for each number of rows, in one arbitrary unit."""
        sizes = np.exp(self._sizes)
        return [float(self._parts(batch, count) @ sizes) for count in rows]

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        cell = batch, rows
        if cell not in self._known:  # the first step of a shape also makes what later steps reuse
            self._known.add(cell)
            self._last = None
            return
        took = math.log(seconds)
        if self._last is not None and self._last[0] != cell:
            self._learn(self._last[0], cell, took - self._last[1])
        self._last = cell, took

    def interrupted(self) -> None:
        """The next step does not follow the last one: the machine's speed may differ."""
        self._last = None

    def _guessed_parts(self, batch: int, rows: int) -> np.ndarray:
        """Seconds of each part of a step, before anything is measured; the linear layers come last."""
        drafted = min(batch, rows - batch)  # requests with a draft, at most
        others = np.array([STEP, REQUEST * batch, ROW * rows, DRAFT * drafted]) * self._linear_seconds(1)
        return np.append(others, self._linear_seconds(rows))

    def _learn(self, before: tuple[int, int], after: tuple[int, int], ratio: float) -> None:
        """Corrects the sizes of the parts by two steps' times. The ratio's derivative with respect to a part's logarithm is the
        difference between the part's shares in the two steps.

        ratio: logarithm of the second step's time over the first's.
        """
        sizes = np.exp(self._sizes)
        first, second = self._parts(*before) * sizes, self._parts(*after) * sizes
        slope = second / second.sum() - first / first.sum()
        error = ratio - math.log(second.sum() / first.sum())
        reach = self._covariance @ slope
        variance = float(slope @ reach) + NOISE**2
        error = min(max(error, -OUTLIER * math.sqrt(variance)), OUTLIER * math.sqrt(variance))
        self._sizes += reach * (error / variance)
        self._covariance -= np.outer(reach, reach) / variance
        # The variance grows again, up to that of the guesses: only other batch sizes tell some of the parts apart.
        self._covariance += DRIFT**2 * (np.eye(len(slope)) - self._covariance / SPREAD**2)


def _best_behind(gains: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The largest gain of each node and those behind it in its tree: a tree keeps its first nodes, so a node brings these with it."""
    best, end = gains.copy(), 0
    for size in sizes.tolist():
        begin, end = end, end + size
        best[begin:end] = np.maximum.accumulate(gains[begin:end][::-1])[::-1]
    return best


class LengthPolicy:
    """Chooses each step's rows and learns from its outcome.

    widths: allowed rows of a request, ascending.
    most_rows: most rows of a step, unless it has the first width.
    by_request: whether each request may have its own number of rows; all have the same otherwise, as on every server so far
        (docs/optimisations.md).
    """

    def __init__(
        self,
        widths: Sequence[int],
        linear_seconds: Callable[[float], float],
        most_rows: float = math.inf,
        by_request: bool = False,
    ) -> None:
        self.widths = tuple(widths)
        self._most_rows = most_rows
        self._by_request = by_request
        self.times = StepTimes(linear_seconds)
        self.acceptance = Acceptance()
        self._started: tuple[float, int, int] | None = None
        self._plain_streak: dict[int, int] = defaultdict(int)
        self._kind, self._steady = 0, 0  # of the last step, and how many were of its kind in a row

    def most_rows(self, batch: int) -> int:
        """The most rows that a step of at most `batch` requests has, rounded up."""
        return int(max(batch * self.widths[0], min(batch * self.widths[-1], self._most_rows)))

    def wants_draft(self, batch: int) -> bool:
        """False where drafts have not paid at this batch size lately. The datastore is then not asked."""
        streak = self._plain_streak[batch]
        return streak < PLAIN_STREAK or streak % PROBE_STEPS == 0

    def choose(self, trees: Sequence[DraftTree], tenants: Sequence[str] | None = None) -> np.ndarray:
        """int64 [batch]: the rows of each request with which this batch's trees bring the most expected tokens a second.

        tenants: the tenant of each tree; None if all are the same.
        """
        batch = len(trees)
        if len(self.widths) == 1:
            return np.full(batch, self.widths[0], np.int64)
        sizes = np.array([len(tree.tokens) for tree in trees], np.int64)
        choose = self._rows_by_request if self._by_request else self._one_width
        rows = choose(trees, sizes, tenants or [""] * batch)
        total = int(rows.sum())
        # Where all have one width, steps of other widths teach what a draft costs.
        kind = min(total, batch + 1) if self._by_request else total
        self._steady = self._steady + 1 if kind == self._kind else 0
        self._kind = kind
        self._plain_streak[batch] = self._plain_streak[batch] + 1 if total == batch else 0
        return rows

    def _one_width(self, trees: Sequence[DraftTree], sizes: np.ndarray, tenants: Sequence[str]) -> np.ndarray:
        batch = len(trees)
        widths = self._useful(int(sizes.max(initial=0)) + 1, batch)
        if len(widths) == 1:  # without a draft there is nothing to compare
            return np.full(batch, widths[0], np.int64)
        tokens = self._tokens(trees, sizes, tenants)
        expected = tokens[np.minimum(widths, len(tokens)) - 1]
        best = self._most_per_second(expected, batch, [batch * width for width in widths])
        return np.full(batch, widths[best], np.int64)

    def _tokens(self, trees: Sequence[DraftTree], sizes: np.ndarray, tenants: Sequence[str]) -> np.ndarray:
        """Expected of a step, by width - 1 up to the largest tree's."""
        gains = self.acceptance.estimate(trees, tenants)
        places = np.arange(len(gains)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within the tree
        return np.cumsum(np.append(len(trees), np.bincount(places, gains)))

    def _rows_by_request(
        self, trees: Sequence[DraftTree], sizes: np.ndarray, tenants: Sequence[str]
    ) -> np.ndarray:
        """Gives rows to the nodes that are likeliest to be accepted, whose trees they may be of."""
        batch, nodes = len(trees), int(sizes.sum())
        if not nodes:
            return np.ones(batch, np.int64)
        gains = self.acceptance.estimate(trees, tenants)
        owners = np.repeat(np.arange(batch), sizes)
        order = np.argsort(-_best_behind(gains, sizes), kind="stable")
        counts = [count for count in ROW_COUNTS if count <= nodes]
        expected = batch + np.append(0.0, np.cumsum(gains[order]))[counts]
        best = counts[self._most_per_second(expected, batch, [batch + count for count in counts])]
        return 1 + np.bincount(owners[order[:best]], minlength=batch)

    def _most_per_second(self, expected: np.ndarray, batch: int, rows: Sequence[int]) -> int:
        """Which number of rows brings the most expected tokens a second. After STEADY_STEPS steps of one kind it is one of another, to be
        measured.

        expected: tokens with each number of rows.
        rows: at least two, ascending, the first without a draft.
        """
        seconds = np.array(self.times.seconds(batch, rows))
        seconds[1:] *= MARGIN
        best = int(np.argmax(expected / seconds))
        if self._steady < STEADY_STEPS:
            return best
        # Only other numbers of rows give ratios: now and then a plain step, or a small draft for each request.
        return 0 if best else min(int(np.searchsorted(rows, 2 * batch)), len(rows) - 1)

    def _useful(self, longest: int, batch: int) -> list[int]:
        """Widths up to the first that holds the largest tree. Wider ones would only verify padding."""
        enough = next((w for w in self.widths if w >= longest), self.widths[-1])
        wider = [w for w in self.widths[1:] if w <= enough and w * batch <= self._most_rows]
        return [self.widths[0], *wider]

    def step_started(
        self,
        batch: int,
        rows: int,
        comparable: bool = True,
        at: float | None = None,
        waited: float = 0.0,
    ) -> tuple[int, int, float] | None:
        """Called after a decode step's forward was launched. The time since the previous launch is the previous step's time.
        comparable: False if something else ran in between (a prefill, an idle gap). at: time of the launch by perf_counter,
        None for now. waited: seconds before it in which the draft side was waited for, which say nothing of its rows. Returns the
        previous step's batch, rows and seconds, waiting and all, if they count."""
        now = time.perf_counter() if at is None else at
        finished = None
        if not comparable:
            self.times.interrupted()
        elif self._started is not None:
            started, last_batch, last_rows = self._started
            finished = last_batch, last_rows, now - started
            self.times.observe(last_batch, last_rows, now - started - waited)
        self._started = (now, batch, rows)
        return finished

    def interrupted(self) -> None:
        """Something else runs before the next step: the time until then is not a decode step's."""
        self._started = None
        self.times.interrupted()
