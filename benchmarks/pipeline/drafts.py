"""What is drafted after which outcomes, without a datastore: the planner against fixed shapes (DUO, tables 2 and 3), and after what an
early exit of the target expects against the draft model's own predictions (MIRROR, figures 3a and 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.pipeline.experiments import NO_LIMIT, Case, Question, chained, warm_up
from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import EarlyExit, Setting, Tally
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.side import DraftParts, Learner
from sglang_patches.drafting.seams import Fallback, NoFallback
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.double import AllAccepted
from sglang_patches.methods.duo import Heads, Sequences
from sglang_patches.methods.mirror import ExpectedOutcomes
from sglang_patches.methods.planner import Branches, LikeliestOutcomes
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts, WaitingFallback

PLANNER = "planner"
SPLITS = (1, 2, 3, 4)  # sequences of DUO's static rows (table 2)
BUDGETS = (0.25, 0.5, 2.0, 4.0)  # gamma over C (table 3), beside 1
CHOICES = (1, 2, 4, 8)
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
DRAFT = "draft"  # predicts itself what it drafts after
RIGHT = "right exit"  # that knows everything

Shape = Callable[[int, float], Learner]  # most nodes, C


def play(
    question: Question,
    case: Case,
    batch: int,
    learner: Callable[[], Learner],
    exit: EarlyExit | None = None,
    fallback: Fallback | None = None,
) -> Tally:
    """Nothing answers a miss at once."""
    parts, answers = DraftParts(learner), fallback or NoFallback()
    times, nodes = question.times, question.lookahead
    setting = Setting(times, nodes, question.draft_rows, lambda now: parts, lambda around: answers, exit=exit)
    return question.played(case, batch, setting)


class FixedRatio(SpeedRatio):
    """A budget that is given in place of the measured ratio."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    @property
    def value(self) -> float:
        return self._value


def shapes() -> dict[str, Shape]:
    """Each shape's way to draft. All have the same rows per forward, and none retrieves."""

    def split(share: float = 1.0, **heads: int) -> Shape:
        return lambda nodes, ratio: Learner(Heads(**heads), Sequences(nodes, FixedRatio(share * ratio)))

    return {
        PLANNER: lambda nodes, ratio: _planned(nodes),
        "geometric fan-out": lambda nodes, ratio: Learner(GeometricFanOut(), Rollouts(nodes)),
        "chain": lambda nodes, ratio: Learner(AllAccepted(), Rollouts(nodes)),
        "dynamic split": split(),
        **{f"split in {count}": split(fixed=count) for count in SPLITS},
        **{f"dynamic, gamma = {budget:g} C": split(budget) for budget in BUDGETS},
    }


def _planned(nodes: int) -> Learner:
    outcomes = LikeliestOutcomes()
    return Learner(outcomes, Branches(nodes, outcomes.rates_of))


def against_shapes(
    question: Question, cases: Sequence[Case], batch: int, ratios: Sequence[float]
) -> Iterator[dict]:
    """A row for each case, ratio and shape. planner_over: tokens a verification of the planner over the shape's."""
    for case, ratio, asked in question.each(cases, ratios):
        made = {name: partial(shape, asked.lookahead, ratio) for name, shape in shapes().items()}
        tallies = {name: play(asked, case, batch, learner) for name, learner in made.items()}
        for name, tally in tallies.items():
            yield {
                **case, "ratio": ratio, "batch": batch, "shape": name, "tokens_a_step": tally.per("tokens"),
                "over_plain": tally.over_plain(asked.plain(batch)),
                "planner_over": tallies[PLANNER].over(tally, "tokens"),
            }  # fmt: skip


class ExitAlone(ExpectedOutcomes):
    """The paper's MIRROR: nothing is guessed before the early exit has spoken, and then its choices alone."""

    def choices(self, draft: Draft, node: int) -> dict[int, float]:
        rates = super().choices(draft, node) if node in draft.expected else {}
        return {token: rates[token] for token in draft.expected[node].tokens.tolist()} if rates else {}


def middle(pairs: Sequence[Pair], layers: int) -> EarlyExit:
    """The exit next to half of the target."""
    layer = min(pairs[0].exits, key=lambda at: abs(at - layers / 2))
    return EarlyExit(layer, layer / layers, CHOICES[-1])


def with_right_exit(question: Question, layer: int) -> Question:
    """With one exit, whose only choice is the target's token."""

    def right(pair: Pair) -> Pair:
        return replace(pair, exits={layer: (pair.tokens[:, None], np.ones((len(pair), 1), np.float32))})

    return replace(question, pairs=lambda case, batch: [*map(right, question.pairs(case, batch))])


def played(question: Question, case: Case, batch: int, exit: EarlyExit | None, waits: bool = False) -> Tally:
    """The same guesses with and without an exit. waits: on a miss, for the draft model."""
    nodes, outcomes = question.lookahead, LikeliestOutcomes if exit is None else ExitAlone
    fallback = WaitingFallback(NoFallback(), nodes, NO_LIMIT) if waits else None
    return play(question, case, batch, lambda: Learner(outcomes(), Rollouts(nodes)), exit, fallback)


def by_choices(
    question: Question, cases: Sequence[Case], batch: int, ratios: Sequence[float], layers: int
) -> Iterator[dict]:
    """Figure 7: how often nothing was prepared, by exit, kappa and ratio. hits_over_draft: over the draft model's own predictions, with
    as many guesses. layers: of the target."""
    for case, ratio, asked in question.each(cases, ratios):
        at = sorted(asked.pairs(case, batch)[0].exits)
        exits = [EarlyExit(layer, layer / layers, choices) for layer in at for choices in CHOICES]
        own = played(asked, case, batch, None)
        for exit in (None, *exits):
            tally = played(asked, case, batch, exit) if exit else own
            yield {
                **case, "ratio": ratio, "batch": batch, "exit": f"{exit.layer}/{layers}" if exit else DRAFT,
                "choices": exit.choices if exit else 0, "hit_rate": tally.per("hits"),
                "over_plain": tally.over_plain(asked.plain(batch)),
                "hits_over_draft": tally.over(own, "hits"), "speed_over_draft": tally.over(own, "tokens", "seconds"),
            }  # fmt: skip


def bounds(
    question: Question, cases: Sequence[Case], batch: int, ratios: Sequence[float], layers: int
) -> Iterator[dict]:
    """The most that an exit could give: it always knows the target's token, and speaks when its layers have been run."""
    for case, ratio, asked in question.each(cases, ratios):
        own = played(asked, case, batch, None)
        for layer in sorted(asked.pairs(case, batch)[0].exits):
            tally = played(with_right_exit(asked, layer), case, batch, EarlyExit(layer, layer / layers, 1))
            yield {
                **case, "ratio": ratio, "batch": batch, "exit": f"{layer}/{layers}",
                "over_plain": tally.over_plain(asked.plain(batch)),
                "speed_over_draft": tally.over(own, "tokens", "seconds"),
            }  # fmt: skip


def by_window(
    question: Question,
    case: Case,
    batch: int,
    ratios: Sequence[float],
    layers: int,
    windows: Sequence[int] = WINDOWS,
) -> Iterator[dict]:
    """Figure 3a: a step's drafting on the critical path, over a target forward of one row, and tokens per step, by gamma. A draft that was
    not prepared is waited for, and `serial` drafts nothing beside the target. The paper's law has no misses, as with `right exit`."""
    pairs = question.pairs(case, batch)
    exit = middle(pairs, layers)
    for _, ratio, at_ratio in question.each([case], ratios):
        for window in windows:
            asked, unit = replace(at_ratio, lookahead=window), at_ratio.times.target(1)
            labels = {**case, "ratio": ratio, "batch": batch, "window": window}
            predicted = {
                DRAFT: (asked, None),
                "exit": (asked, exit),
                RIGHT: (with_right_exit(asked, exit.layer), exit),
            }
            for name, (of, predicts) in predicted.items():
                tally = played(of, case, batch, predicts, waits=True)
                critical = tally.waiting * batch / tally.steps.total() / unit
                yield labels | {
                    "predicts": name,
                    "critical": critical,
                    "tokens_a_step": tally.tokens_a_step(),
                }
            counts = [chained(pair, window) for pair in pairs[warm_up(pairs) :]]
            emitted, taken = (sum(of) for of in zip(*counts, strict=True))
            drafting = window * asked.times.draft(batch) / unit
            yield labels | {"predicts": "serial", "critical": drafting, "tokens_a_step": emitted / taken}
