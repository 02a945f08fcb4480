"""`python -m benchmarks.rejected`: what the rejected tier gains (Double, table 9): recorded answers replayed with it and
without, tokens a step by category, with paired bootstrap intervals over answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.manifest import manifest
from benchmarks.prompts import spec_bench_category
from benchmarks.statistics import Interval, ratio_of_sums, throughput_ratio
from benchmarks.traces import Trace, load_traces, replay
from datastore_service.engine.engine import Engine, Limits
from datastore_service.engine.fusion import FusionWeights
from datastore_service.engine.types import Budget

REFUSALS = 4096


def measure(traces: Sequence[Trace], vocab_size: int, budget: Budget, refusals: int) -> list[tuple[int, int]]:
    """(tokens, steps) of each trace."""
    engine = Engine(vocab_size, weights=FusionWeights(), limits=Limits(refusals=refusals))
    counts = []
    for trace in traces:
        steps = list(replay(engine, trace, budget))
        counts.append((sum(step.tokens for step in steps), len(steps)))
    return counts


def compare(
    traces: Sequence[Trace], vocab_size: int, budget: Budget
) -> dict[str, tuple[Interval, Interval, Interval]]:
    """By category, and "all": tokens a step with the tier, without, and the ratio."""
    told = measure(traces, vocab_size, budget, REFUSALS)
    untold = measure(traces, vocab_size, budget, 0)
    names = [spec_bench_category(trace.category) for trace in traces]
    result = {}
    for wanted in (*dict.fromkeys(names), "all"):
        chosen = [i for i, name in enumerate(names) if wanted in (name, "all")]
        columns = [[row[i][k] for i in chosen] for row in (told, untold) for k in (0, 1)]
        result[wanted] = (
            ratio_of_sums(*columns[:2]), ratio_of_sums(*columns[2:]), throughput_ratio(*columns)
        )  # fmt: skip
    return result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--traces", type=Path, nargs="+", required=True, help="files of python -m benchmarks.record"
    )
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    traces = [trace for path in given.traces for trace in load_traces(path)]
    table = Table(title=f"tokens a step with and without the rejected tier, {len(traces)} answers")
    for heading in ("nodes", "category", "with", "without", "ratio"):
        table.add_column(heading)
    results = {}
    for nodes in given.nodes:
        results[nodes] = compare(traces, given.vocab_size, Budget(nodes))
        for name, figures in results[nodes].items():
            table.add_row(str(nodes), name, *map(str, figures))
    Console(width=120).print(table)
    if given.json:
        rows = {
            nodes: {name: [interval.as_dict() for interval in row] for name, row in result.items()}
            for nodes, result in results.items()
        }
        document = {"manifest": manifest(given.traces, **vars(given)), "results": rows}
        given.json.write_text(json.dumps(document, default=str, indent=1))


if __name__ == "__main__":
    main()
