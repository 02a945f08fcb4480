"""Past the ceiling of parallel speculation: what either retrieval of DOUBLE adds, by acceptance and speed ratio (table 1, figure 5),
and by what the datastore has seen (tables 3 and 9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from benchmarks.pipeline.experiments import (
    Case,
    Question,
    at_ratio,
    hits,
    over,
    seconds,
    steps,
    tokens,
    warm_up,
)
from benchmarks.pipeline.methods import setting_of
from benchmarks.pipeline.pairs import VOCABULARY, Pair, half_remembered
from benchmarks.pipeline.simulation import Pipeline, Tally
from benchmarks.report.statistics import ratio_of_sums
from datastore_service.client import Datastore
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from datastore_service.engine.segment import build_segment
from sglang_patches.options import Options

RATIOS = (1.6, 2.8, 3.9, 4.7, 5.0)  # C of the paper's five pairs of models
PHRASE = Options().draft_phrase
NEITHER, DRAFT, TARGET, BOTH, ALONE = "neither", "draft model", "target", "both", "datastore alone"
# Who retrieves: tokens of a phrase, and what the target verifies beside the draft. With neither it is plain parallel speculation.
WHO = {NEITHER: (0, "none"), DRAFT: (PHRASE, "none"), TARGET: (0, "datastore"), BOTH: (PHRASE, "datastore")}
STORED_RATIOS = (2.8, 4.7, 10.0)  # C where the datastore is varied
NEVER = 1e-9  # C of a draft that is never in time
NONE, NOTHING, OTHER, PRIOR = "none", "nothing", "another domain", "prior"
REFUSED, AGAIN = "prior, refused tokens", "prior, asked again"
# What a datastore has in the beginning, and which one it is compared with. NONE is no datastore at all.
COMPARED = {NOTHING: NONE, OTHER: NOTHING, PRIOR: NOTHING, REFUSED: PRIOR, AGAIN: PRIOR}


def ceiling(
    question: Question, cases: Sequence[Case], batch: int, known: float, ratios: Sequence[float] = RATIOS
) -> Iterator[dict]:
    """A row for each case, ratio and who retrieves. known: share of right tokens in what is known of synthetic texts."""
    for case in cases:
        store = question.datastore or partly_known(question.pairs(case, batch), known)
        for ratio in ratios:
            asked = replace(question, times=at_ratio(question.times, ratio), datastore=store)
            for who in (*WHO, ALONE):
                found = _figures(played(asked, case, batch, who), question.plain(batch))
                yield {**case, "ratio": ratio, "retrieves": who, **found}


def datastores(
    question: Question,
    cases: Sequence[Case],
    batch: int,
    stored: Callable[[Case], Mapping[str, Callable[[], Datastore]]],
    ratios: Sequence[float] = STORED_RATIOS,
) -> Iterator[dict]:
    """A row for each case, ratio and datastore, of DOUBLE and of the datastore alone. stored: of a case, by `COMPARED`'s names. Both
    models ask one datastore."""
    for case in cases:
        stores, alone = stored(case), {}
        for who, ratio in ((ALONE, NEVER), *((BOTH, ratio) for ratio in ratios)):
            asked = replace(question, times=at_ratio(question.times, ratio), datastore=stores[NOTHING])
            tallies = {NONE: played(asked, case, batch, NEITHER)}
            for name, store in stores.items():
                tallies[name] = played(replace(asked, datastore=store), case, batch, who, shared=True)
            alone = alone or tallies
            for name, tally in tallies.items():
                other = tallies.get(COMPARED.get(name, ""))
                yield {
                    **case, "method": who if ratio == NEVER else "DOUBLE", "ratio": None if ratio == NEVER else ratio,
                    "datastore": name, **_figures(tally, question.plain(batch)),
                    "over_other": other and over(other, tally, tokens, seconds),
                    "over_alone": over(alone[name], tally, tokens, seconds),
                }  # fmt: skip


def _figures(tally: Tally, plain: float) -> dict:
    missed = steps(tally) - hits(tally)
    return {
        "over_plain": ratio_of_sums([count / plain for count in tally.each(tokens)], tally.each(seconds)),
        "tokens_a_step": ratio_of_sums(tally.each(tokens), tally.each(steps)),
        "tokens_a_miss": tokens(tally) / missed if missed else None,
    }


def played(question: Question, case: Case, batch: int, who: str, shared: bool = False) -> Tally:
    """who: of `WHO`, or `ALONE`, where no draft is ever in time. shared: both models ask one datastore, else each has its own."""
    assert question.datastore is not None
    phrase, fallback = WHO[TARGET if who == ALONE else who]
    times = replace(question.times, draft=lambda rows: 1e9) if who == ALONE else question.times
    nodes = question.lookahead
    rows = nodes + 1 + PHRASE  # a verified tree and a phrase fit into one forward
    endpoint, store = ("unix:one", cache(question.datastore)) if shared else ("embedded", question.datastore)
    options = Options(endpoint, nodes=nodes, draft_rows=rows, draft_phrase=phrase, fallback=fallback)
    pairs = question.pairs(case, batch)
    setting = setting_of("DOUBLE", options, times, store)
    return Pipeline(setting, pairs, batch).run(warm_up(pairs))


def partly_known(pairs: Sequence[Pair], known: float) -> Callable[[], Datastore]:
    """Opens datastores whose prior has a faulty copy of each text."""
    prior = [build_segment(half_remembered(pairs, known), VOCABULARY)]
    return lambda: EmbeddedDatastore(lambda: Engine(VOCABULARY, prior))
