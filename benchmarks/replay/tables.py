"""Replay's results in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.prompts import ALL
from benchmarks.replay.methods import OURS

WIDTH = 160


def show(results: dict[str, list[dict]]) -> None:
    console = Console(width=WIDTH)
    for name, records in results.items():
        for table in SHOWN[name](name, records):
            console.print(table)


def by_nodes(name: str, records: Sequence[dict]) -> list[Table]:
    """Methods over node budgets, all categories together; and where ours stands against the best of the others."""
    budgets = sorted({record["nodes"] for record in records})
    table = _table(f"{name}: tokens a step over drafted nodes, all answers", "method", *budgets, "µs a draft")
    for method in dict.fromkeys(record["method"] for record in records):
        own = {
            r["nodes"]: r for r in records if r["method"] == method and r["category"] == ALL
        }  # of all categories
        cells = [own[nodes]["tokens_per_step"] for nodes in budgets]
        table.add_row(method, *map(str, cells), f"{own[budgets[-1]]['p50_us']:.0f}")
    return [table, against_best(name, records, budgets)]


def against_best(name: str, records: Sequence[dict], budgets: Sequence[int]) -> Table:
    table = _table(f"{name}: ours over the best of the others, paired by answer", "category", *budgets)
    for category in dict.fromkeys(record["category"] for record in records):
        cells = []
        for nodes in budgets:
            best = strongest(records, category, nodes)
            cells.append(f"{best['ours_over_it']} {best['method']}" if best else "")
        table.add_row(category, *cells)
    return table


def strongest(records: Sequence[dict], category: str, nodes: int) -> dict | None:
    """The record of the method, not one of ours, with the most tokens a step."""
    others = [
        record
        for record in records
        if (record["category"], record["nodes"]) == (category, nodes)
        and not record["method"].startswith(OURS)
    ]
    return min(others, key=lambda record: record["ours_over_it"].value, default=None)


def by_size(name: str, records: Sequence[dict]) -> list[Table]:
    """Categories over what the prior holds."""
    labels = [key for key in ("beside", "answers") if key in records[0]]
    categories = list(dict.fromkeys(record["category"] for record in records))
    table = _table(f"{name}: tokens a step", *labels, "documents", "tokens", "KB", *categories)
    groups: dict[tuple, dict] = {}
    for record in records:
        key = (*(record[label] for label in labels), record["documents"], record["tokens"], record["bytes"])
        groups.setdefault(key, {})[record["category"]] = record["tokens_per_step"]
    for (*heads, size), cells in groups.items():
        values = [f"{cells[category].value:.2f}" for category in categories]
        table.add_row(*map(str, heads), f"{size / 1e3:.0f}", *values)
    return [table]


def footprints(name: str, records: Sequence[dict]) -> list[Table]:
    table = _table("an index of Python sources", "method", "tokens", "built in s", "bytes a token")
    for record in records:
        figures = (f"{record['build_seconds']:.1f}", f"{record['bytes_per_token']:.1f}")
        table.add_row(record["method"], str(record["tokens"]), *figures)
    return [table]


def _table(title: str, *headings: object) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(str(heading))
    return table


SHOWN = {
    "methods": by_nodes,
    "cold": by_nodes,
    "size": by_size,
    "language": by_size,
    "entries": by_size,
    "footprint": footprints,
}
