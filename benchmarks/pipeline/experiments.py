"""The questions: how misses fall with guesses, how to spread guesses, what answers a miss, and when drafting beside the target pays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import (
    FELL_BACK,
    HIT,
    NOTHING,
    Around,
    PairFallback,
    Pipeline,
    Setting,
    Tally,
    Times,
    rate_of,
)  # fmt: skip
from benchmarks.pipeline.theory import chain_tokens, critical_batch
from benchmarks.report.statistics import Interval, ratio_of_sums, throughput_ratio
from datastore_service.client import Datastore
from datastore_service.protocol.types import Budget
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Guess, Prediction
from sglang_patches.draft_side.side import DraftParts, Learner
from sglang_patches.drafting.datastore import DatastoreFallback, DatastoreFeed
from sglang_patches.drafting.seams import Fallback, NoFallback
from sglang_patches.methods.saguaro import End, GeometricFanOut, Rollouts, SaguaroFallback, WaitingFallback

NO_LIMIT = 1e3  # seconds that a step may wait for the draft side
WARM_UP = 0.2  # of the pairs
LENGTHS = range(1, 16)  # K that a baseline may have
FAN_OUTS = (1, 2, 3, 4, 6, 8, 12)
AFTER = {HIT: (HIT,), FELL_BACK: (FELL_BACK,), "any": (HIT, FELL_BACK, NOTHING)}  # kinds of the step before

Case = Mapping[
    str, float | str
]  # which pairs: the acceptance of synthetic ones, what a file says of recorded ones


class Baseline(NamedTuple):
    """A method that drafting beside the target is compared with. lookahead: its K. tokens, seconds: of each pair that counts."""

    lookahead: int
    tokens: list[float]
    seconds: list[float]

    @property
    def tokens_a_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def best(played: Callable[[int], Baseline], lengths: Iterable[int]) -> Baseline:
    """The fastest of the K over all pairs that count. So what chance there is in the choice is in favour of the baseline."""
    return max(map(played, lengths), key=lambda found: found.tokens_a_second)


class UniformFanOut(GeometricFanOut):
    """As many guesses wherever the path may end, once the draft model has been there."""

    def predict(self, draft: Draft, budget: int) -> Prediction:
        unknown = {node: 1.0 for node in draft.ends if node not in draft.candidates}
        return Prediction([], unknown) if unknown else super().predict(draft, budget)

    def shares(self, ends: np.ndarray, budget: int) -> np.ndarray:
        return np.full(len(ends), budget / len(ends))


class LikeliestFanOut(GeometricFanOut):
    """The likeliest guesses of all ends by the measured rates: Theorem 18, which assumes no power law."""

    def guesses(self, ends: Sequence[End], budget: int) -> list[Guess]:
        everything = super().guesses(ends, 10**6)
        return sorted(everything, key=lambda guess: -guess.probability)[:budget]


FAN_OUT = {"geometric": GeometricFanOut, "uniform": UniformFanOut, "likeliest": LikeliestFanOut}


@dataclass(frozen=True)
class Question:
    """What all experiments share.

    draft_rows: of a draft forward, and outcomes of a step, over all requests. pairs: the models and the batch -> pairs of them.
    datastore: makes an empty one for recorded pairs. Without one, e_miss tokens per step come from a fallback that takes no time.
    """

    times: Times
    lookahead: int
    draft_rows: int
    e_miss: float
    pairs: Callable[[Case, int], list[Pair]]
    datastore: Callable[[], Datastore] | None = None

    def at(self, ratio: float) -> Question:
        """With a quicker or slower draft model. ratio: the target's time over the draft's, of one row each."""
        times = self.times
        scale = times.target(1) / ratio / times.draft(1)
        return replace(self, times=replace(times, draft=lambda rows: scale * times.draft(rows)))

    def each(self, cases: Sequence[Case], ratios: Sequence[float]) -> Iterator[tuple[Case, float, Question]]:
        """Every case at every ratio, and the question at that."""
        return ((case, ratio, self.at(ratio)) for case in cases for ratio in ratios)

    def played(self, case: Case, batch: int, setting: Setting) -> Tally:
        pairs = self.pairs(case, batch)
        return Pipeline(setting, pairs, batch).run(warm_up(pairs))

    def tally(
        self,
        case: Case,
        batch: int,
        fan_out: str = "geometric",
        fallback: str = "datastore",
    ) -> Tally:
        make = self.datastore
        feed = DatastoreFeed(lambda _: make(), NO_LIMIT) if make else None
        parts = DraftParts(lambda: Learner(FAN_OUT[fan_out](), Rollouts(self.lookahead)))
        answers = partial(self.fallback, fallback, feed)
        rows = self.draft_rows
        return self.played(
            case, batch, Setting(self.times, self.lookahead, rows, lambda now: parts, answers, feed)
        )

    def fallback(self, name: str, feed: DatastoreFeed | None, around: Around) -> Fallback:
        """What the names of the results mean; `datastore` always, `by b*` where that is better than to wait."""
        budget = Budget(self.lookahead, depth=self.lookahead)
        synthetic = PairFallback(around.pairs, self.e_miss, self.lookahead, seed=0)
        at_once = DatastoreFallback(feed, budget) if feed else synthetic
        return {
            "none": NoFallback(),
            "wait": WaitingFallback(NoFallback(), self.lookahead, NO_LIMIT),
            "datastore": at_once,
            "by b*": SaguaroFallback(at_once, self.lookahead, NO_LIMIT, around.clock),
        }[name]

    def plain(self, batch: int) -> float:
        """Tokens per second without drafts."""
        return batch / self.times.target(batch)

    def synchronous(self, case: Case, batch: int) -> Baseline:
        """Drafting K tokens with the same model, then verifying them."""
        pairs = self.pairs(case, batch)
        return best(lambda length: self._one_after_the_other(pairs[warm_up(pairs) :], batch, length), LENGTHS)

    def _one_after_the_other(self, pairs: Sequence[Pair], batch: int, length: int) -> Baseline:
        step = length * self.times.draft(batch) + self.times.target(batch * (length + 1))
        emitted, steps = zip(*(chained(pair, length) for pair in pairs), strict=True)
        return Baseline(length, list(emitted), [count * step / batch for count in steps])

    def datastore_alone(self, case: Case, batch: int) -> Baseline:
        """No draft is ever in time. A real datastore is asked for no longer trees than beside the draft model."""
        if self.datastore is None:
            return best(lambda length: self._remembered(case, batch, length), LENGTHS)
        return best(lambda length: self._asked_alone(case, batch, length), range(1, self.lookahead + 1))

    def _remembered(self, case: Case, batch: int, length: int) -> Baseline:
        emitted = chain_tokens(rate_of(self.e_miss, self.lookahead), length)
        pairs = self.pairs(case, batch)
        count = len(pairs) - warm_up(pairs)
        return Baseline(length, [emitted] * count, [self.times.target(batch * (length + 1)) / batch] * count)

    def _asked_alone(self, case: Case, batch: int, length: int) -> Baseline:
        late = replace(self.times, draft=lambda rows: 1e9)
        tally = replace(self, times=late, lookahead=length).tally(case, batch)
        return Baseline(length, tally.each("tokens"), tally.each("seconds"))

    def _figures(self, case: Case, batch: int, tally: Tally, alone: Baseline) -> dict:
        """alone: of the datastore."""
        plain, speed = self.plain(batch), (tally.each("tokens"), tally.each("seconds"))
        sync = self.synchronous(case, batch)
        return {
            "over_plain": tally.over_plain(plain),
            "over_synchronous": throughput_ratio(*speed, sync.tokens, sync.seconds),
            "over_datastore": throughput_ratio(*speed, alone.tokens, alone.seconds),
            "synchronous_over_plain": ratio_of_sums([count / plain for count in sync.tokens], sync.seconds),
            "synchronous_lookahead": sync.lookahead,
            "datastore_lookahead": alone.lookahead,
            "hit_rate": tally.per("hits"),
            "hits_by_session": tally.hits_by_session,
            "tokens_a_step": tally.per("tokens"),
            "waiting": tally.waiting / tally.seconds,
            "hidden": tally.hidden,
        }  # fmt: skip

    def rows(self, case: Case, batch: int, name: str, values: Sequence[str], **variant: str) -> list[dict]:
        """A row for each value of one part of the variant. What the others have over the first, pair by pair, is added."""
        alone = self.datastore_alone(case, batch)
        tallies = [self.tally(case, batch, **{name: value}, **variant) for value in values]
        first = tallies[0]
        return [
            {
                **case, "batch": batch, name: value, **variant, **self._figures(case, batch, tally, alone),
                "hits_over_first": tally.over(first, "hits"),
                "speed_over_first": tally.over(first, "tokens", "seconds"),
            }
            for value, tally in zip(values, tallies, strict=True)
        ]  # fmt: skip


def warm_up(pairs: Sequence[Pair]) -> int:
    """The first pairs, which the predictor and the fallback learn from before those that count."""
    return int(WARM_UP * len(pairs))


def chained(pair: Pair, lookahead: int) -> tuple[int, int]:
    """Tokens and steps of synchronous decoding."""
    right, at, steps = pair.ranks() == 0, 0, 0
    while at + lookahead < len(right):
        ends = np.flatnonzero(~right[at : at + lookahead])
        at += (int(ends[0]) if len(ends) else lookahead) + 1
        steps += 1
    return at, steps


def forecast(question: Question, cases: Sequence[Case], batches: Sequence[int]) -> list[dict]:
    return fallbacks(question, cases, batches, ["by b*"])


def misses(question: Question, case: Case, fan_outs: Sequence[int] = FAN_OUTS) -> dict:
    """Figure 3: the miss rate by guesses per position, after a step of either kind and after any, and the power law through it. The
    budget is the paper's: F guesses at each of K + 1 positions."""
    times = replace(question.times, draft=lambda rows: 1e-6, delay=0.0)
    rows = []
    for fan_out in fan_outs:
        fast = replace(question, times=times, draft_rows=fan_out * (question.lookahead + 1))
        tally = fast.tally(case, 1, "uniform")
        rows += [
            {**case, "after": name, "fan_out": fan_out, "miss_rate": missed_after(tally, kinds)}
            for name, kinds in AFTER.items()
            if sum(tally.after[kind, FELL_BACK] for kind in kinds)
        ]
    laws = {name: power_law([row for row in rows if row["after"] == name]) for name in AFTER}
    return {"rows": rows, "exponents": laws}


def missed_after(tally: Tally, kinds: Sequence[str]) -> Interval:
    def after(part: Tally, *to: str) -> int:
        return sum(part.after[kind, next_one] for kind in kinds for next_one in to)

    parts = [part for part in tally.parts if after(part, HIT, FELL_BACK, NOTHING)]
    missed = [after(part, FELL_BACK, NOTHING) for part in parts]
    return ratio_of_sums(missed, [after(part, HIT, FELL_BACK, NOTHING) for part in parts])


def power_law(rows: Sequence[dict]) -> Interval:
    """r of a miss rate c F^-r, by least squares of the logarithms."""
    from scipy.stats import linregress
    from scipy.stats import t as student_t

    rates = [row["miss_rate"].value for row in rows]
    line = linregress(np.log([row["fan_out"] for row in rows]), np.log(rates))
    spread = float(student_t.ppf(0.975, len(rows) - 2) * line.stderr)
    return Interval(-line.slope, -line.slope - spread, -line.slope + spread)


def spreads(question: Question, cases: Sequence[Case], batch: int) -> list[dict]:
    """Figure 4: how guesses are spread, by acceptance or temperature."""
    names = list(FAN_OUT)
    return [row for case in cases for row in question.rows(case, batch, "fan_out", names, fallback="none")]


def fallbacks(
    question: Question,
    cases: Sequence[Case],
    batches: Sequence[int],
    names: Sequence[str] = ("none", "wait", "datastore", "by b*"),
) -> list[dict]:
    """Figure 6, left: what answers a miss, by batch."""
    at = [(case, batch) for case in cases for batch in batches]
    return [row for case, batch in at for row in question.rows(case, batch, "fallback", names)]


def critical(question: Question, case: Case, fallback: str) -> float:
    """Theorem 17's b* for the rates of a simulated batch of one, in which `fallback` answers a miss at once."""
    tally, times = question.tally(case, 1, fallback=fallback), question.times
    in_time = question.lookahead * times.draft(1) + 2 * times.delay
    e_miss = tally.tokens_a_step(FELL_BACK, NOTHING)
    in_steps = in_time / times.target(question.lookahead + 1)
    return critical_batch(tally.hit_rate, tally.tokens_a_step(HIT), e_miss, in_steps)


def ratios(question: Question, case: Case, batches: Sequence[int], speeds: Sequence[float]) -> Iterator[dict]:
    """When it pays: by the target's time over the draft's, of one row each."""
    for batch in batches:
        for _, speed, asked in question.each([case], speeds):
            for row in asked.rows(case, batch, "fallback", ["by b*"]):
                yield {"speed": speed, **row}


def break_even(rows: Sequence[dict], over: str) -> float | None:
    """The speed ratio from which on `over` is above 1; None if it is not at the highest."""
    rows = sorted(rows, key=lambda row: row["speed"])
    above = [row[over].value > 1 for row in rows]
    first = len(above) - next((at for at, yes in enumerate(reversed(above)) if not yes), len(above))
    if first == len(above):
        return None
    if first == 0:
        return rows[0]["speed"]
    around = rows[first - 1 : first + 1]
    xs, ys = [np.log(row["speed"]) for row in around], [row[over].value for row in around]
    return float(np.exp(np.interp(1.0, ys, xs)))
