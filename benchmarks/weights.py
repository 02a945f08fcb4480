"""`python -m benchmarks.weights`: search for the constants of `weighted` fusion.

Coordinate descent on recorded answers to *training* prompts (benchmarks.record; none of them may be in a set that is
measured later): each constant in turn is moved up and down, and a move that improves the score stays. The score is the
mean over categories of tokens a step, less the squared error of the estimate of accepted tokens, which the length
policy spends its rows by. Each category is replayed twice: with an empty prior, and with a prior of its other half's
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.options import add_tokenizer, options
from benchmarks.replay.method import replay
from benchmarks.replay.ours import Ours, Tiers
from benchmarks.report.records import finish
from benchmarks.sources import source_documents
from benchmarks.traces import Trace, by_category, load_traces
from datastore_service.engine.fusion import FusionWeights
from datastore_service.engine.segment import Segment, build_segment

MOVES = (0.15, 0.05)  # of a share between 0 and 1, a pass each
FACTORS = (1.5, 1.15)  # of the others
SEARCHED = ("trust_session", "hold_session", "trust_prior", "hold_prior", "doubt", "floor", "odds")
NODES = 16
ERROR_WEIGHT = 0.1
SOURCE_PROMPT, SOURCE_OUTPUT = 256, 256


@dataclass(frozen=True)
class Task:
    """Traces of one category and the prior they are replayed with."""

    name: str
    traces: Sequence[Trace]
    prior: Sequence[Segment]


@dataclass(frozen=True)
class Score:
    """tokens_per_step: mean over the tasks. error: mean squared error of a tree's estimated accepted tokens."""

    tokens_per_step: float
    error: float

    @property
    def value(self) -> float:
        return self.tokens_per_step - ERROR_WEIGHT * self.error


def tasks_of(traces: Sequence[Trace], vocab_size: int) -> list[Task]:
    """Two tasks a category: an empty prior, and the answers of the category's second half as the prior of its first."""
    tasks = []
    for name, rows in by_category(traces).items():
        half = (len(rows) + 1) // 2
        prior = build_segment([trace.output for trace in rows[half:]], vocab_size)
        tasks += [Task(name, rows[:half], ()), Task(f"{name} with prior", rows[:half], (prior,))]
    return tasks


def source_traces(documents: Sequence[np.ndarray], count: int) -> list[Trace]:
    """Python sources as if a model had written all but their beginning."""
    long = [document for document in documents if len(document) >= SOURCE_PROMPT + SOURCE_OUTPUT]
    return [
        Trace("python", text[:SOURCE_PROMPT], text[SOURCE_PROMPT : SOURCE_PROMPT + SOURCE_OUTPUT])
        for text in long[:count]
    ]


def score(weights: FusionWeights, tasks: Sequence[Task], vocab_size: int) -> Score:
    rates, errors = [], []
    for task in tasks:
        ours = Ours(task.prior, vocab_size, NODES, Tiers(live=False), weights)
        steps = [step for trace in task.traces for step in replay(ours, trace)]
        rates.append(np.mean([step.tokens for step in steps]))
        errors.append(np.mean([(step.tree.probs.sum() - step.tokens + 1) ** 2 for step in steps]))
    return Score(float(np.mean(rates)), float(np.mean(errors)))


def neighbours(weights: FusionWeights, size: int) -> list[FusionWeights]:
    """The weights with one constant moved; pairs up and down, in the order of SEARCHED."""
    moved = []
    for name in SEARCHED:
        value = getattr(weights, name)
        if isinstance(value, tuple):
            for place, share in enumerate(value):
                for other in (share - MOVES[size], share + MOVES[size]):
                    row = (*value[:place], round(float(np.clip(other, 0.02, 0.98)), 3), *value[place + 1 :])
                    moved.append(changed(weights, name, row))
        else:
            moved += [changed(weights, name, value * factor) for factor in (FACTORS[size], 1 / FACTORS[size])]
    return moved


def changed(weights: FusionWeights, name: str, value: object) -> FusionWeights:
    """One constant replaced; the live tier has the prior's, because neither replay nor training prompts tell them apart."""
    return replace(weights, **{name: value, name.replace("prior", "live"): value})


def search(
    start: FusionWeights, start_score: Score, tasks: Sequence[Task], vocab_size: int
) -> tuple[FusionWeights, Score]:
    best, best_score = start, start_score
    console = Console(stderr=True)
    for size in range(len(MOVES)):
        for place in track(range(len(neighbours(start, size))), f"pass {size + 1}", console=console):
            candidate = neighbours(best, size)[place]
            found = score(candidate, tasks, vocab_size)
            if found.value > best_score.value:
                best, best_score = candidate, found
        console.print(f"{best_score}")
    return best, best_score


def main(argv: Sequence[str] | None = None) -> None:
    parser = options("weights", __doc__)
    parser.add_argument("--traces", type=Path, nargs="+", required=True)
    add_tokenizer(parser)
    parser.add_argument("--per-category", type=int, default=24)
    parser.add_argument("--sources", type=int, default=24, help="Python sources replayed beside the traces")
    parser.add_argument("--evaluate", action="store_true", help="score the defaults, search nothing")
    given = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(given.tokenizer))
    vocab_size = tokenizer.get_vocab_size()
    by_name = by_category(load_traces(*given.traces))
    kept = [trace for rows in by_name.values() for trace in rows[: given.per_category]]
    if given.sources:
        kept += source_traces(source_documents(tokenizer, 4000 * given.sources), given.sources)
    tasks, best = tasks_of(kept, vocab_size), FusionWeights()
    before = after = score(best, tasks, vocab_size)
    if not given.evaluate:
        best, after = search(best, before, tasks, vocab_size)
    results = {"before": asdict(before), "after": asdict(after), "weights": asdict(best)}
    finish("weights", given, given.traces, **results)


if __name__ == "__main__":
    main()
