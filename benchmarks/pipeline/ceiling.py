"""Past the ceiling of parallel speculation: what either retrieval of DOUBLE adds, by acceptance and speed ratio (table 1, figure 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from benchmarks.pipeline.experiments import Case, Question, at_ratio, hits, seconds, steps, tokens, warm_up
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


def ceiling(
    question: Question, cases: Sequence[Case], batch: int, known: float, ratios: Sequence[float] = RATIOS
) -> Iterator[dict]:
    """A row for each case, ratio and who retrieves. known: share of right tokens in what is known of synthetic texts."""
    for case in cases:
        store = question.datastore or partly_known(question.pairs(case, batch), known)
        for ratio in ratios:
            asked = replace(question, times=at_ratio(question.times, ratio), datastore=store)
            for who in (*WHO, ALONE):
                yield {**case, "ratio": ratio, "retrieves": who, **_figures(asked, case, batch, who)}


def _figures(question: Question, case: Case, batch: int, who: str) -> dict:
    tally, plain = played(question, case, batch, who), question.plain(batch)
    missed = steps(tally) - hits(tally)
    return {
        "over_plain": ratio_of_sums([count / plain for count in tally.each(tokens)], tally.each(seconds)),
        "tokens_a_step": ratio_of_sums(tally.each(tokens), tally.each(steps)),
        "tokens_a_miss": tokens(tally) / missed if missed else None,
    }


def played(question: Question, case: Case, batch: int, who: str) -> Tally:
    """who: of `WHO`, or `ALONE`, where no draft is ever in time."""
    assert question.datastore is not None
    phrase, fallback = WHO[TARGET if who == ALONE else who]
    times = replace(question.times, draft=lambda rows: 1e9) if who == ALONE else question.times
    nodes = question.lookahead
    rows = nodes + 1 + PHRASE  # a verified tree and a phrase fit into one forward
    options = Options(nodes=nodes, draft_rows=rows, draft_phrase=phrase, fallback=fallback)
    pairs = question.pairs(case, batch)
    setting = setting_of("DOUBLE", options, times, question.datastore)
    return Pipeline(setting, pairs, batch).run(warm_up(pairs))


def partly_known(pairs: Sequence[Pair], known: float) -> Callable[[], Datastore]:
    """Opens datastores whose prior has a faulty copy of each text."""
    prior = [build_segment(half_remembered(pairs, known), VOCABULARY)]
    return lambda: EmbeddedDatastore(Engine(VOCABULARY, prior))
