"""Methods of the registry as the simulator plays them: their own parts on the virtual clocks, against each other, and DOUBLE against
the ceiling of parallel speculation (table 1, figure 5) and by what the datastore has seen (tables 3 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from benchmarks.pipeline.drafts import middle
from benchmarks.pipeline.experiments import Case, Question
from benchmarks.pipeline.pairs import VOCABULARY, Pair, half_remembered
from benchmarks.pipeline.simulation import HIT, Around, EarlyExit, Setting, Tally, Times
from datastore_service.client import Datastore
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.types import Budget
from sglang_patches.draft_side.side import DraftParts, Learner
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.seams import Fallback
from sglang_patches.methods.double import AllAccepted
from sglang_patches.methods.registry import METHODS, DraftSurroundings, Surroundings
from sglang_patches.methods.saguaro import Rollouts
from sglang_patches.options import Options
from sglang_patches.step.length import CANDIDATE_WIDTHS, LengthPolicy

NEVER = 1e9  # seconds of a draft forward that is never in time
AUTOMATIC, PLAIN = "ADAPTIVE", "plain"
RATIOS = (1.6, 2.8, 3.9, 4.7, 5.0)  # C of the paper's five pairs of models
PHRASE = Options().draft_phrase
NEITHER, DRAFT, TARGET, BOTH, ALONE = "neither", "draft model", "target", "both", "datastore alone"
# Who retrieves: tokens of a phrase, and what the target verifies beside the draft. With neither it is plain parallel speculation.
WHO = {NEITHER: (0, "none"), DRAFT: (PHRASE, "none"), TARGET: (0, "datastore"), BOTH: (PHRASE, "datastore")}
STORED_RATIOS = (2.8, 4.7, 10.0)  # C where the datastore is varied
NONE, NOTHING, OTHER, PRIOR = "none", "nothing", "another domain", "corpus"
REFUSED, AGAIN = "corpus, rejected tokens", "corpus, asked again"
# What a datastore has in the beginning, and which one it is compared with. NONE is no datastore at all.
COMPARED = {NOTHING: NONE, OTHER: NOTHING, PRIOR: NOTHING, REFUSED: PRIOR, AGAIN: PRIOR}

Make = Callable[[], Datastore]


def setting_of(
    name: str,
    options: Options,
    times: Times,
    open_datastore: Make,
    policy: LengthPolicy | None = None,
    exit: EarlyExit | None = None,
) -> Setting:
    """name: of a method. exit: of one that reads one. open_datastore: the worker's, and another for the draft process. Neither takes
    time."""
    method, nodes = METHODS[name], options.nodes
    feed = DatastoreFeed(lambda _: open_datastore(), options.deadline_ms / 1e3)
    if method.draft_parts is None:
        times = replace(times, draft=lambda rows: NEVER)

    def parts(now: Callable[[], float]) -> DraftParts:
        if method.draft_parts is None:
            return DraftParts(lambda: Learner(AllAccepted(), Rollouts(1)))
        return method.draft_parts(
            DraftSurroundings(options, options.draft_lookahead, nodes, open_datastore, now)
        )

    def fallback(around: Around) -> Fallback:
        budget, channel = Budget(nodes, depth=nodes), lambda: around.channel
        known = Surroundings(options, feed, budget, channel, now=around.clock)
        return method.parts(known).fallback

    more = {"feed": feed, "policy": policy, "publish": options.publish == "on", "exit": exit}
    return Setting(times, nodes, options.draft_rows, parts, fallback, **more)


def policy_of(length: str, nodes: int, seconds: Callable[[float], float]) -> LengthPolicy:
    """As the worker makes it. seconds: of a step by the rows of all its requests."""
    narrower = [width for width in CANDIDATE_WIDTHS if width <= nodes] if length == "adaptive" else []
    return LengthPolicy([*narrower, nodes + 1], seconds)


def contest(
    question: Question,
    cases: Sequence[Case],
    batches: Sequence[int],
    ratios: Sequence[float],
    stored: Callable[[Case, int], Mapping[str, Make]],
) -> Iterator[dict]:
    """A row for each case, load, ratio, batch and method; a method with an early exit only of pairs that have one. over_best: of
    ADAPTIVE alone, over the fastest of the others, plain decoding among them. stored: makes the datastores, by their load."""
    for case in cases:
        for batch in batches:
            for load, store in stored(case, batch).items():
                for ratio in ratios:
                    labels = {**case, "load": load, "ratio": ratio, "batch": batch}
                    yield from _round(replace(question.at(ratio), datastore=store), labels, case, batch)


def _round(question: Question, labels: Case, case: Case, batch: int) -> Iterator[dict]:
    plain, pairs = question.plain(batch), question.pairs(case, batch)
    names = [name for name, method in METHODS.items() if not method.early_exit or pairs[0].exits]
    tallies = {name: _of_method(question, case, batch, name) for name in names}
    best = max((tally.tokens_a_second, name) for name, tally in tallies.items() if name != AUTOMATIC)
    for name, tally in tallies.items():
        found = {"over_plain": tally.over_plain(plain), "tokens_a_step": tally.per("tokens")}
        found["hits_by_session"] = tally.hits_by_session
        if name == AUTOMATIC:
            is_plain = best[0] < plain
            found["best"] = PLAIN if is_plain else best[1]
            found["over_best"] = (
                found["over_plain"] if is_plain else tally.over(tallies[best[1]], "tokens", "seconds")
            )
        yield {**labels, "method": name, **found}


def _of_method(question: Question, case: Case, batch: int, name: str) -> Tally:
    assert question.datastore is not None
    nodes = question.lookahead
    options = Options("embedded", nodes=nodes, draft_rows=question.draft_rows, draft_lookahead=nodes)
    policy = policy_of("adaptive", nodes, lambda rows: question.times.target(int(rows)))
    exit = middle(question.pairs(case, batch), int(case["layers"])) if METHODS[name].early_exit else None
    setting = setting_of(name, options, question.times, question.datastore, policy, exit=exit)
    return question.played(case, batch, setting)


def ceiling(
    question: Question,
    cases: Sequence[Case],
    batch: int,
    known: float | None,
    ratios: Sequence[float] = RATIOS,
) -> Iterator[dict]:
    """A row for each case, ratio and who retrieves. known: share of right tokens in what is known of synthetic texts."""
    for case in cases:
        store = question.datastore or partly_known(question.pairs(case, batch), known or 0.0)
        for ratio in ratios:
            asked = replace(question.at(ratio), datastore=store)
            for who in (*WHO, ALONE):
                found = _figures(played(asked, case, batch, who), question.plain(batch))
                yield {**case, "ratio": ratio, "retrieves": who, **found}


def datastores(
    question: Question,
    cases: Sequence[Case],
    batch: int,
    stored: Callable[[Case], Mapping[str, Make]],
    ratios: Sequence[float] = STORED_RATIOS,
) -> Iterator[dict]:
    """A row for each case, ratio and datastore, of DOUBLE and of the datastore alone. stored: of a case, by `COMPARED`'s names. Both
    models ask one datastore."""
    for case in cases:
        stores, alone = stored(case), {}
        for who, ratio in ((ALONE, None), *((BOTH, ratio) for ratio in ratios)):
            asked = question.at(ratio or 1.0)
            tallies = {
                NONE: played(replace(asked, datastore=stores[NOTHING]), case, batch, NEITHER, late=not ratio)
            }
            for name, store in stores.items():
                tallies[name] = played(replace(asked, datastore=store), case, batch, who, shared=True)
            alone = alone or tallies
            for name, tally in tallies.items():
                other = tallies.get(COMPARED.get(name, ""))
                yield {
                    **case, "method": "DOUBLE" if ratio else who, "ratio": ratio, "datastore": name,
                    **_figures(tally, question.plain(batch)),
                    "over_other": other and tally.over(other, "tokens", "seconds"),
                    "over_alone": tally.over(alone[name], "tokens", "seconds"),
                }  # fmt: skip


def _figures(tally: Tally, plain: float) -> dict:
    missed = tally.steps.total() - tally.steps[HIT]
    per_miss = tally.tokens.total() / missed if missed else None
    return {
        "over_plain": tally.over_plain(plain),
        "tokens_a_step": tally.per("tokens"),
        "tokens_a_miss": per_miss,
    }


def played(
    question: Question, case: Case, batch: int, who: str, shared: bool = False, late: bool = False
) -> Tally:
    """who: of `WHO`, or `ALONE`. shared: both models ask one datastore, else each has its own. late: no draft is ever in time."""
    assert question.datastore is not None
    phrase, fallback = WHO[TARGET if who == ALONE else who]
    times = replace(question.times, draft=lambda rows: NEVER) if late or who == ALONE else question.times
    nodes = question.lookahead
    rows = nodes + 1 + PHRASE  # a verified tree and a phrase fit into one forward
    endpoint, store = ("unix:one", cache(question.datastore)) if shared else ("embedded", question.datastore)
    options = Options(endpoint, nodes=nodes, draft_rows=rows, draft_phrase=phrase, fallback=fallback)
    return question.played(case, batch, setting_of("DOUBLE", options, times, store))


def partly_known(pairs: Sequence[Pair], known: float) -> Make:
    """Opens datastores whose prior has a faulty copy of each text."""
    prior = [build_segment(half_remembered(pairs, known), VOCABULARY)]
    return lambda: EmbeddedDatastore(lambda: Engine(VOCABULARY, prior))
