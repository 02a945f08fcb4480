"""The questions: how misses fall with guesses, how to spread guesses, what answers a miss, and when drafting beside the target pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.stats import linregress
from scipy.stats import t as student_t

from benchmarks.pipeline import theory
from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import (
    FELL_BACK,
    HIT,
    NOTHING,
    Clock,
    PairFallback,
    Pipeline,
    Setting,
    Tally,
    Times,
)
from benchmarks.report.statistics import Interval, ratio_of_sums
from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.fallback import Fallback, NoFallback
from sglang_patches.drafting.predictor import Guess
from sglang_patches.drafting.saguaro import GeometricFanOut, SaguaroFallback, WaitingFallback

NO_LIMIT = 1e3  # seconds that a step may wait for the draft side
WARM_UP = 0.3  # steps that the predictor learns from before those that count, over these
FAN_OUTS = (1, 2, 3, 4, 6, 8, 12)


class UniformFanOut(GeometricFanOut):
    """As many guesses wherever the path may end."""

    def shares(self, ends: np.ndarray, budget: int) -> np.ndarray:
        return np.full(len(ends), budget / len(ends))


class LikeliestFanOut(GeometricFanOut):
    """The likeliest guesses of all ends by the measured rates: Theorem 18, which assumes no power law."""

    def guesses(self, draft: Draft, budget: int) -> list[Guess]:
        everything = super().guesses(draft, 10**6)
        return sorted(everything, key=lambda guess: -guess.probability)[:budget]


FAN_OUT = {"uniform": UniformFanOut, "geometric": GeometricFanOut, "likeliest": LikeliestFanOut}


@dataclass(frozen=True)
class Question:
    """What all experiments share. pairs: acceptance rate, or None where pairs were recorded -> as many pairs as asked for.
    e_miss: tokens a step of the fallback that takes no time. steps: of single requests, in all."""

    times: Times
    lookahead: int
    guesses: int
    e_miss: float
    steps: int
    pairs: Callable[[float | None, int], list[Pair]]

    def tally(
        self, acceptance: float | None, batch: int, fan_out: str = "geometric", fallback: str = "datastore"
    ) -> Tally:
        setting = Setting(
            self.times, self.lookahead, self.guesses, FAN_OUT[fan_out], partial(self.fallback, fallback)
        )
        steps = -(-self.steps // batch)
        return Pipeline(setting, self.pairs(acceptance, batch)).run(steps, int(WARM_UP * steps))

    def fallback(self, name: str, pairs: dict[str, Pair], clock: Clock) -> Fallback:
        """What the names of the results mean; `datastore` always, `by b*` where that is better than to wait."""
        at_once = PairFallback(pairs, self.e_miss, self.lookahead, seed=0)
        return {
            "none": NoFallback(),
            "wait": WaitingFallback(NoFallback(), self.lookahead, NO_LIMIT),
            "datastore": at_once,
            "by b*": SaguaroFallback(at_once, self.lookahead, NO_LIMIT, clock),
        }[name]

    def plain(self, batch: int) -> float:
        """Tokens a second without drafts."""
        return batch / self.times.target(batch)

    def synchronous(self, acceptance: float | None, batch: int) -> float:
        """Tokens a second of drafting K tokens, then verifying them."""
        tokens = np.mean([accepted(pair, self.lookahead) + 1 for pair in self.pairs(acceptance, batch)])
        drafting = self.lookahead * (self.times.draft(batch))
        return batch * float(tokens) / (drafting + self.times.target(batch * (self.lookahead + 1)))

    def row(self, acceptance: float | None, batch: int, **variant: str) -> dict:
        tally = self.tally(acceptance, batch, **variant)
        plain, synchronous = self.plain(batch), self.synchronous(acceptance, batch)
        width_time = self.times.target(batch * (self.lookahead + 1))
        return {
            **({} if acceptance is None else {"acceptance": acceptance}), "batch": batch, **variant,
            "over_plain": tally.tokens_a_second / plain,
            "over_synchronous": tally.tokens_a_second / synchronous,
            "over_datastore": tally.tokens_a_second * width_time / (batch * self.e_miss),
            "synchronous_over_plain": synchronous / plain,
            "hit_rate": tally.hit_rate,
            "tokens_a_step": tally.tokens_a_step(),
            "waiting": tally.waiting / tally.seconds,
            "hidden": tally.hidden,
        }  # fmt: skip


def accepted(pair: Pair, lookahead: int) -> float:
    """Mean accepted tokens of a step of synchronous decoding."""
    right, at, steps = pair.ranks() == 0, 0, 0
    while at + lookahead < len(right):
        ends = np.flatnonzero(~right[at : at + lookahead])
        at += (int(ends[0]) if len(ends) else lookahead) + 1
        steps += 1
    return at / max(1, steps) - 1


def misses(
    question: Question, acceptance: float | None, batch: int, fan_outs: Sequence[int] = FAN_OUTS
) -> dict:
    """Figure 3: the miss rate by guesses a position, after a step of either kind, and the power law through it."""
    times = replace(question.times, draft=lambda rows: 1e-6, delay=0.0)
    fast = replace(question, times=times, steps=question.steps // 2)
    rows = []
    for fan_out in fan_outs:
        guesses = fan_out * (question.lookahead + 1)
        tallies = [
            replace(fast, guesses=guesses, pairs=lambda a, _, pair=pair: [pair]).tally(
                acceptance, 1, "uniform"
            )
            for pair in question.pairs(acceptance, batch)
        ]
        rows += [
            {"after": kind, "fan_out": fan_out, "miss_rate": missed_after(tallies, kind)}
            for kind in (HIT, FELL_BACK)
            if any(tally.after[kind, FELL_BACK] for tally in tallies)
        ]
    laws = {kind: power_law([row for row in rows if row["after"] == kind]) for kind in (HIT, FELL_BACK)}
    return {"rows": rows, "exponents": laws}


def missed_after(tallies: Sequence[Tally], kind: str) -> Interval:
    missed = [tally.after[kind, FELL_BACK] for tally in tallies]
    return ratio_of_sums(
        missed, [tally.after[kind, HIT] + here for tally, here in zip(tallies, missed, strict=True)]
    )


def power_law(rows: Sequence[dict]) -> Interval:
    """r of a miss rate c F^-r, by least squares of the logarithms."""
    line = linregress(
        np.log([row["fan_out"] for row in rows]), np.log([row["miss_rate"].value for row in rows])
    )
    spread = float(student_t.ppf(0.975, len(rows) - 2) * line.stderr)
    return Interval(-line.slope, -line.slope - spread, -line.slope + spread)


def spreads(question: Question, rates: Sequence[float | None], batch: int) -> Iterator[dict]:
    """Figure 4: how guesses are spread, by acceptance."""
    for acceptance in rates:
        for name in FAN_OUT:
            yield question.row(acceptance, batch, fan_out=name, fallback="none")


def fallbacks(question: Question, acceptance: float | None, batches: Sequence[int]) -> Iterator[dict]:
    """Figure 6, left: what answers a miss, by batch."""
    for batch in batches:
        for name in ("none", "wait", "datastore", "by b*"):
            yield question.row(acceptance, batch, fallback=name)


def critical(question: Question, acceptance: float | None, fallback: str) -> float:
    """Theorem 17's b* for the rates of a simulated batch of one, in which `fallback` answers a miss at once."""
    tally, times = question.tally(acceptance, 1, fallback=fallback), question.times
    in_time = question.lookahead * times.draft(1) + 2 * times.delay
    e_miss = tally.tokens_a_step(FELL_BACK, NOTHING)
    return theory.critical_batch(
        tally.hit_rate, tally.tokens_a_step(HIT), e_miss, in_time / times.target(question.lookahead + 1)
    )


def ratios(
    question: Question, acceptance: float | None, batches: Sequence[int], speeds: Sequence[float]
) -> Iterator[dict]:
    """When it pays: by the target's time over the draft's, of one row each."""
    target = question.times.target(1)
    for batch in batches:
        for speed in speeds:
            scale = target / speed / question.times.draft(1)
            times = replace(
                question.times, draft=lambda rows, scale=scale: scale * question.times.draft(rows)
            )
            yield {"speed": speed, **replace(question, times=times).row(acceptance, batch, fallback="by b*")}


def break_even(rows: Sequence[dict], over: str) -> float | None:
    """The speed ratio from which on `over` is above 1; None if it is not at the highest."""
    rows = sorted(rows, key=lambda row: row["speed"])
    above = [row[over] > 1 for row in rows]
    first = len(above) - next((at for at, yes in enumerate(reversed(above)) if not yes), len(above))
    if first == len(above):
        return None
    if first == 0:
        return rows[0]["speed"]
    xs, ys = zip(*((np.log(row["speed"]), row[over]) for row in rows[first - 1 : first + 1]), strict=True)
    return float(np.exp(np.interp(1.0, ys, xs)))
