"""A run's figures in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.prompts import ALL

HEADINGS = (
    "case", "batch", "category", "arm", "groups", "x plain", "tokens/step", "ms/step", "tokens/s", "predicted",
    "TTFT ms", "gap p50", "gap p99", "differing",
)  # fmt: skip


def show(summary: Sequence[dict], checked: Sequence[dict] = ()) -> None:
    console = Console(width=180)
    table = Table(title="decode throughput over plain decoding, 95% intervals over groups")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in summary:
        table.add_row(*map(str, cells(row)))
    console.print(table)
    shares = Table(title="where a decode step's time goes")
    parts = next((list(row["breakdown"]) for row in summary if row["breakdown"]), [])
    for heading in ("case", "batch", "arm", *parts):
        shares.add_column(heading)
    for row in summary:
        if row["breakdown"] and row["category"] == ALL:
            values = (f"{row['breakdown'][part]:.1%}" for part in parts)
            shares.add_row(row["case"], str(row["batch"]), row["arm"], *values)
    if parts:
        console.print(shares)
    if checked:
        console.print(by_bench_serving(checked))


def by_bench_serving(checked: Sequence[dict]) -> Table:
    table = Table(title="the same servers under sglang.bench_serving")
    for heading in checked[0]:
        table.add_column(heading)
    for row in checked:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def cells(row: dict) -> list[object]:
    predicted = row.get("predicted_tokens_per_second")
    return [
        row["case"], row["batch"], row["category"], row["arm"], row["groups"], row["throughput_ratio"],
        row["tokens_per_step"], f"{row['milliseconds_per_step']:.1f}", f"{row['tokens_per_second']:.1f}",
        f"{predicted:.1f}" if predicted else "",
        *(f"{1e3 * row[key]:.0f}" for key in ("ttft_p50", "gap_p50", "gap_p99")),
        f"{row['outputs_differing']:.0%}",
    ]  # fmt: skip
