"""Tables of `python -m benchmarks.replay`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.prompts import ALL
from benchmarks.report.markdown import Picture, columns, in_order, interval, no_picture, pivot, table

OURS = "specstore"  # the method, and how the names of its variants begin
MIDDLE = 16  # nodes of the draft times
BUDGETS = (8, 16, 32)  # nodes of the comparison by category


def is_ours(row: dict) -> bool:
    return row["method"].startswith(OURS)


def tables(record: dict, picture: Picture = no_picture) -> list[str]:
    results = record["results"]
    lines = ["## Replay: tokens per step without a model in the loop", ""]
    for name, (title, tabulate) in SECTIONS.items():
        if results.get(name):
            lines += [f"### {title}", "", *tabulate(results[name]), *picture(name, title)]
        if name == "methods":
            lines += picture("sources", "What each source brings")
    if record.get("missing"):
        lines += [
            f"Left out, because arctic-inference is not installed (`make peers`): {', '.join(record['missing'])}.",
            "",
        ]
    return lines


def compared(rows: Sequence[dict]) -> list[str]:
    """Every method by node budget, then ours over the strongest other by category."""
    overall = [row for row in rows if row["category"] == ALL]
    budgets, found = pivot(overall, ("method",), "nodes", lambda row: interval(row["tokens_per_step"]))
    timed = {r["method"]: r for r in overall if r["nodes"] == (MIDDLE if MIDDLE in budgets else budgets[-1])}
    cells = [
        [
            f"**{name}**" if name == OURS else name,
            *values,
            *(f"{timed[name][p]:.0f}" for p in ("p50_us", "p99_us")),
        ]
        for name, *values in found
    ]
    headings = ("tokens per step, all answers", *_nodes(budgets), "µs per draft, p50", "p99")
    return [*table(headings, cells), *against_others(rows)]


def against_others(rows: Sequence[dict]) -> list[str]:
    others = [row for row in rows if not is_ours(row) and row["nodes"] in BUDGETS]
    if not others:
        return []
    places = (
        (category, nodes) for category in in_order(others, "category") for nodes in in_order(others, "nodes")
    )
    best = [strongest(others, *place) for place in places]
    budgets, cells = pivot(
        best, ("category",), "nodes", lambda row: f"{interval(row['ours_over_it'])} {row['method']}"
    )
    losses = [row for row in best if row["ours_over_it"]["value"] < 1]
    shown = "; ".join(
        f"{row['category']}, {row['nodes']} nodes: {interval(row['ours_over_it'])} of {row['method']}"
        for row in losses
    )
    verdict = f"Ours is behind in: {shown}." if losses else "Ours is behind nowhere."
    return [*table(("ours over the strongest other", *_nodes(budgets)), cells), verdict, ""]


def strongest(others: Sequence[dict], category: str, nodes: int) -> dict:
    """The method that ours gains least over."""
    here = [row for row in others if (row["category"], row["nodes"]) == (category, nodes)]
    return min(here, key=lambda row: row["ours_over_it"]["value"])


def by_kind(rows: Sequence[dict]) -> list[str]:
    """Ours over each other method by kind of text, and what the texts were."""
    others = [row for row in rows if not is_ours(row)]
    budgets, cells = pivot(others, ("category", "method"), "nodes", lambda row: interval(row["ours_over_it"]))
    texts = {row["category"]: row for row in rows if row["texts"]}
    named = (
        f"- {kind}: {', '.join(f'{name} {number}' for name, number in row['packages'].items())}; SHA-256 of its tokens {row['texts'][:16]}"
        for kind, row in texts.items()
    )
    return [*table(("ours over it", "method", *_nodes(budgets)), cells), *named, ""]


def _nodes(budgets: Sequence[int]) -> list[str]:
    return [f"{nodes} nodes" for nodes in budgets]


def grown(rows: Sequence[dict]) -> list[str]:
    """Categories by what the prior holds."""
    rows = [row | {"KB": f"{row['bytes'] / 1e3:.0f}"} for row in rows]
    by = [name for name in ("beside", "answers", "documents", "tokens", "KB") if name in rows[0]]
    categories, cells = pivot(rows, by, "category", lambda row: f"{row['tokens_per_step']['value']:.2f}")
    return table((*by, *categories), cells)


FOOTPRINT = {
    "method": "{method}", "tokens": "{tokens}", "seconds to build": "{build_seconds:.1f}",
    "bytes per token, memory that stays": "{bytes_per_token:.1f}",
}  # fmt: skip
SECTIONS = {
    "methods": ("With a corpus", compared),
    "cold": ("Without a corpus", compared),
    "paper": ("Beside the paper's SSSD", compared),
    "kinds": ("Kinds of text, beside the paper's SSSD and suffix decoding", by_kind),
    "size": ("A growing corpus (SSSD, figure 5a; Double, table 3)", grown),
    "language": ("Another language (SSSD, figure 5b)", grown),
    "entries": ("Whose answers (SSSD, figure 5c)", grown),
    "footprint": ("What an index costs", partial(columns, cells=FOOTPRINT)),
}
