"""Every method against every other, and the planner against fixed shapes of a draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.pipeline.exits import middle
from benchmarks.pipeline.experiments import Case, Question, at_ratio, over, seconds, steps, tokens, warm_up
from benchmarks.pipeline.methods import policy_of, setting_of
from benchmarks.pipeline.simulation import Pipeline, Setting, Tally
from benchmarks.report.statistics import ratio_of_sums
from datastore_service.client import Datastore
from sglang_patches.draft_side.side import DraftParts, Learner
from sglang_patches.drafting.seams import NoFallback
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.double import AllAccepted
from sglang_patches.methods.duo import Heads, Sequences
from sglang_patches.methods.planner import Branches, LikeliestOutcomes
from sglang_patches.methods.registry import METHODS
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
from sglang_patches.options import Options

AUTOMATIC = "SPECSTORE"
PLAIN = "plain"
PLANNER = "planner"
SPLITS = (1, 2, 3, 4)  # sequences of DUO's static rows (table 2)
BUDGETS = (0.25, 0.5, 2.0, 4.0)  # gamma over C (table 3), beside 1


def contest(
    question: Question,
    cases: Sequence[Case],
    batches: Sequence[int],
    ratios: Sequence[float],
    stored: Callable[[Case, int], Mapping[str, Callable[[], Datastore]]],
) -> Iterator[dict]:
    """A row for each case, load, ratio, batch and method; a method with an early exit only of pairs that have one. over_best: of SPECSTORE alone, over the fastest of the others, plain
    decoding among them. stored: of a case and batch, what makes the datastores, by their load."""
    for case in cases:
        for batch in batches:
            for load, store in stored(case, batch).items():
                for ratio in ratios:
                    asked = replace(question, times=at_ratio(question.times, ratio), datastore=store)
                    yield from _round(asked, {**case, "load": load, "ratio": ratio}, case, batch)


def _round(question: Question, labels: Case, case: Case, batch: int) -> Iterator[dict]:
    plain = question.plain(batch)
    played = [
        name
        for name, method in METHODS.items()
        if not method.early_exit or question.pairs(case, batch)[0].exits
    ]
    tallies = {name: _played(question, case, batch, name) for name in played}
    best = max((tally.tokens_a_second, name) for name, tally in tallies.items() if name != AUTOMATIC)
    for name, tally in tallies.items():
        over_plain = ratio_of_sums([count / plain for count in tally.each(tokens)], tally.each(seconds))
        found = {
            "over_plain": over_plain,
            "tokens_a_step": ratio_of_sums(tally.each(tokens), tally.each(steps)),
            "hits_by_session": tally.hits_by_session,
        }
        if name == AUTOMATIC:
            is_plain = best[0] < plain
            found["best"] = PLAIN if is_plain else best[1]
            found["over_best"] = over_plain if is_plain else over(tallies[best[1]], tally, tokens, seconds)
        yield {**labels, "batch": batch, "method": name, **found}


def _played(question: Question, case: Case, batch: int, name: str) -> Tally:
    assert question.datastore is not None
    nodes = question.lookahead
    options = Options("embedded", nodes=nodes, draft_rows=question.draft_rows, draft_lookahead=nodes)
    policy = policy_of("adaptive", nodes, lambda rows: question.times.target(int(rows)))
    pairs = question.pairs(case, batch)
    exit = middle(pairs, int(case["layers"])) if METHODS[name].early_exit else None
    setting = setting_of(name, options, question.times, question.datastore, policy, exit=exit)
    return Pipeline(setting, pairs, batch).run(warm_up(pairs))


class FixedRatio(SpeedRatio):
    """A budget that is given in place of the measured ratio."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    @property
    def value(self) -> float:
        return self._value


Shape = Callable[[int, float], DraftParts]  # most nodes, C


def shapes() -> dict[str, Shape]:
    """What makes each shape's draft side. All have the same rows a forward, and none retrieves."""
    return {
        PLANNER: lambda nodes, ratio: _planned(nodes),
        "geometric fan-out": lambda nodes, ratio: DraftParts(
            lambda: Learner(GeometricFanOut(), Rollouts(nodes))
        ),
        "chain": lambda nodes, ratio: DraftParts(lambda: Learner(AllAccepted(), Rollouts(nodes))),
        "dynamic split": lambda nodes, ratio: _split(nodes, ratio, Heads()),
        **{f"split in {count}": _static(count) for count in SPLITS},
        **{f"dynamic, gamma = {budget:g} C": _budget(budget) for budget in BUDGETS},
    }


def _planned(nodes: int) -> DraftParts:
    outcomes = LikeliestOutcomes()
    return DraftParts(lambda: Learner(outcomes, Branches(nodes, outcomes.rates_of)))


def _split(nodes: int, gamma: float, heads: Heads) -> DraftParts:
    return DraftParts(lambda: Learner(heads, Sequences(nodes, FixedRatio(gamma))))


def _static(count: int) -> Shape:
    return lambda nodes, ratio: _split(nodes, ratio, Heads(fixed=count))


def _budget(budget: float) -> Shape:
    return lambda nodes, ratio: _split(nodes, budget * ratio, Heads())


def against_shapes(
    question: Question, cases: Sequence[Case], batch: int, ratios: Sequence[float]
) -> Iterator[dict]:
    """A row for each case, ratio and shape. planner_over: tokens a verification of the planner over the shape's."""
    for case in cases:
        for ratio in ratios:
            asked = replace(question, times=at_ratio(question.times, ratio))
            tallies = {name: _shaped(asked, case, batch, shape, ratio) for name, shape in shapes().items()}
            plain = asked.plain(batch)
            for name, tally in tallies.items():
                yield {
                    **case, "ratio": ratio, "batch": batch, "shape": name,
                    "tokens_a_step": ratio_of_sums(tally.each(tokens), tally.each(steps)),
                    "over_plain": ratio_of_sums([count / plain for count in tally.each(tokens)], tally.each(seconds)),
                    "planner_over": over(tally, tallies[PLANNER], tokens, steps),
                }  # fmt: skip


def _shaped(question: Question, case: Case, batch: int, shape: Shape, ratio: float) -> Tally:
    nodes = question.lookahead
    setting = Setting(
        question.times,
        nodes,
        question.draft_rows,
        lambda now: shape(nodes, ratio),
        lambda around: NoFallback(),
    )
    pairs = question.pairs(case, batch)
    return Pipeline(setting, pairs, batch).run(warm_up(pairs))
