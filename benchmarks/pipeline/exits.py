"""Drafting after what an early exit of the target expects (MIRROR), against drafting after the draft model's own predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.pipeline.experiments import (
    NO_LIMIT,
    Case,
    Question,
    at_ratio,
    chained,
    hits,
    over,
    seconds,
    steps,
    tokens,
    warm_up,
)
from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import EarlyExit, Pipeline, Setting, Tally
from benchmarks.report.statistics import ratio_of_sums
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.side import DraftParts, Learner
from sglang_patches.drafting.seams import NoFallback
from sglang_patches.methods.mirror import ExpectedOutcomes
from sglang_patches.methods.planner import LikeliestOutcomes
from sglang_patches.methods.saguaro import Rollouts, WaitingFallback

CHOICES = (1, 2, 4, 8)
WINDOWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15)
MOST = CHOICES[-1]
DRAFT = "draft"  # predicts itself what it drafts after
RIGHT = "right exit"  # that knows everything


class ExitAlone(ExpectedOutcomes):
    """The paper's MIRROR: nothing is guessed before the early exit has spoken, and then its choices alone."""

    def choices(self, draft: Draft, node: int) -> dict[int, float]:
        rates = super().choices(draft, node) if node in draft.expected else {}
        return {token: rates[token] for token in draft.expected[node].tokens.tolist()} if rates else {}


def middle(pairs: Sequence[Pair], layers: int) -> EarlyExit:
    """The exit next to half of the target."""
    layer = min(pairs[0].exits, key=lambda at: abs(at - layers / 2))
    return EarlyExit(layer, layer / layers, MOST)


def with_right_exit(question: Question, layer: int) -> Question:
    """With one exit, whose only choice is the target's token."""

    def right(pair: Pair) -> Pair:
        return replace(pair, exits={layer: (pair.tokens[:, None], np.ones((len(pair), 1), np.float32))})

    return replace(question, pairs=lambda case, batch: [*map(right, question.pairs(case, batch))])


def played(question: Question, case: Case, batch: int, exit: EarlyExit | None, waits: bool = False) -> Tally:
    """The same guesses with and without an exit. Nothing answers a miss at once. waits: for the draft model instead."""
    nodes = question.lookahead
    outcomes = LikeliestOutcomes if exit is None else ExitAlone
    fallback = WaitingFallback(NoFallback(), nodes, NO_LIMIT) if waits else NoFallback()
    setting = Setting(
        question.times,
        nodes,
        question.draft_rows,
        lambda now: DraftParts(lambda: Learner(outcomes(), Rollouts(nodes))),
        lambda around: fallback,
        exit=exit,
    )
    pairs = question.pairs(case, batch)
    return Pipeline(setting, pairs, batch).run(warm_up(pairs))


def by_choices(
    question: Question, cases: Sequence[Case], batch: int, ratios: Sequence[float], layers: int
) -> Iterator[dict]:
    """Figure 7: how often nothing was prepared, by exit, kappa and ratio. hits_over_draft: over the draft model's own predictions, with
    as many guesses. layers: of the target."""
    for case in cases:
        pairs = question.pairs(case, batch)
        exits = [
            EarlyExit(layer, layer / layers, choices)
            for layer in sorted(pairs[0].exits)
            for choices in CHOICES
        ]
        for ratio in ratios:
            asked = replace(question, times=at_ratio(question.times, ratio))
            own = played(asked, case, batch, None)
            plain = asked.plain(batch)
            for exit in (None, *exits):
                tally = own if exit is None else played(asked, case, batch, exit)
                yield {
                    **case, "ratio": ratio, "batch": batch,
                    "exit": DRAFT if exit is None else f"{exit.layer}/{layers}",
                    "choices": 0 if exit is None else exit.choices,
                    "hit_rate": ratio_of_sums(tally.each(hits), tally.each(steps)),
                    "over_plain": ratio_of_sums([count / plain for count in tally.each(tokens)], tally.each(seconds)),
                    "hits_over_draft": over(own, tally, hits, steps),
                    "speed_over_draft": over(own, tally, tokens, seconds),
                }  # fmt: skip


def bounds(
    question: Question, cases: Sequence[Case], batch: int, ratios: Sequence[float], layers: int
) -> Iterator[dict]:
    """The most that an exit could give: it always knows the target's token, and speaks when its layers have been run."""
    for case in cases:
        exits = sorted(question.pairs(case, batch)[0].exits)
        for ratio in ratios:
            asked = replace(question, times=at_ratio(question.times, ratio))
            own, plain = played(asked, case, batch, None), asked.plain(batch)
            for layer in exits:
                exit = EarlyExit(layer, layer / layers, 1)
                tally = played(with_right_exit(asked, layer), case, batch, exit)
                yield {
                    **case, "ratio": ratio, "batch": batch, "exit": f"{layer}/{layers}",
                    "over_plain": ratio_of_sums([count / plain for count in tally.each(tokens)], tally.each(seconds)),
                    "speed_over_draft": over(own, tally, tokens, seconds),
                }  # fmt: skip


def by_window(
    question: Question,
    case: Case,
    batch: int,
    ratios: Sequence[float],
    layers: int,
    windows: Sequence[int] = WINDOWS,
) -> Iterator[dict]:
    """Figure 3a: a step's drafting on the critical path, over a target forward of one row, and tokens a step, by gamma. A draft that was
    not prepared is waited for, and `serial` drafts nothing beside the target. The paper's law has no misses, as with `right exit`."""
    pairs = question.pairs(case, batch)
    exit = middle(pairs, layers)
    for ratio in ratios:
        for window in windows:
            asked = replace(question, times=at_ratio(question.times, ratio), lookahead=window)
            labels = {**case, "ratio": ratio, "batch": batch, "window": window}
            unit = asked.times.target(1)
            for name, of, predicts in (
                (DRAFT, asked, None),
                ("exit", asked, exit),
                (RIGHT, with_right_exit(asked, exit.layer), exit),
            ):
                tally = played(of, case, batch, predicts, waits=True)
                critical = tally.waiting * batch / tally.steps.total() / unit
                yield {
                    **labels,
                    "predicts": name,
                    "critical": critical,
                    "tokens_a_step": tally.tokens_a_step(),
                }
            counts = [chained(pair, window) for pair in pairs[warm_up(pairs) :]]
            emitted, taken = (sum(of) for of in zip(*counts, strict=True))
            drafting = window * asked.times.draft(batch) / unit
            yield {**labels, "predicts": "serial", "critical": drafting, "tokens_a_step": emitted / taken}
