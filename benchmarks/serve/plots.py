"""A run's figures as pictures; `summary` as read back from the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.prompts import ALL

CURVE = "mixed"  # the case that runs at every batch size


def draw(summary: Sequence[dict], beside: Path) -> None:
    for name, figure in (
        ("curve", curve(summary)),
        ("cases", ratios(summary)),
        ("predicted", predictions(summary)),
    ):
        if figure is not None:
            figure.savefig(beside.with_name(f"{beside.stem}-{name}.png"), dpi=110)


def curve(summary: Sequence[dict]) -> Figure | None:
    """Throughput over latency, a point a batch size (SSSD, figure 6): up and to the left is better."""
    rows = [row for row in summary if row["case"] == CURVE and row["category"] == ALL]
    if not rows:
        return None
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="mean time between tokens of a request, ms", ylabel="tokens a second, all requests"
    )
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["batch"])
        across, up = [1e3 * row["gap_mean"] for row in own], [row["tokens_per_second"] for row in own]
        axes.plot(across, up, marker="o", label=arm)
        for x, y, row in zip(across, up, own, strict=True):
            axes.annotate(
                str(row["batch"]), (x, y), textcoords="offset points", xytext=(4, 4), fontsize="x-small"
            )
    axes.grid(alpha=0.3)
    axes.legend(title="numbers: batch size", fontsize="small")
    return figure


def ratios(summary: Sequence[dict]) -> Figure | None:
    """Throughput over plain decoding of every case."""
    rows = [row for row in summary if row["arm"] != "plain"]
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    places = list(dict.fromkeys((row["case"], row["category"], row["batch"]) for row in rows))
    if not places:
        return None
    figure = Figure(figsize=(8, 0.32 * len(places) + 1.5), layout="constrained")
    axes = figure.add_subplot(xlabel="throughput over plain decoding")
    for number, arm in enumerate(arms):
        for place, key in enumerate(places):
            row = next(
                (r for r in rows if (r["case"], r["category"], r["batch"]) == key and r["arm"] == arm), None
            )
            if row is None:
                continue
            ratio, height = row["throughput_ratio"], -place - 0.7 * number / len(arms)
            ends = [ratio["value"] if ratio[end] is None else ratio[end] for end in ("low", "high")]
            errors = [[ratio["value"] - ends[0]], [ends[1] - ratio["value"]]]
            label = arm if place == 0 else None
            axes.errorbar(
                ratio["value"], height, xerr=errors, fmt="o", markersize=3, color=f"C{number}", label=label
            )
    axes.axvline(1, color="black", linewidth=0.8)
    labels = [
        f"{case}{'' if category == ALL else ', ' + category}, batch {batch}"
        for case, category, batch in places
    ]
    axes.set_yticks([-i - 0.3 for i in range(len(places))], labels, fontsize="x-small")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="small")
    return figure


def predictions(summary: Sequence[dict]) -> Figure | None:
    """Predicted over measured throughput."""
    rows = [row for row in summary if row.get("predicted_tokens_per_second")]
    if not rows:
        return None
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="measured tokens/s", ylabel="predicted tokens/s", xscale="log", yscale="log"
    )
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        axes.plot(
            [row["tokens_per_second"] for row in own],
            [row["predicted_tokens_per_second"] for row in own],
            "o",
            label=arm,
        )
    ends = [row["tokens_per_second"] for row in rows]
    line = [min(ends), max(ends)]
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(
        line, [0.9 * x for x in line], [1.1 * x for x in line], alpha=0.1, color="black", label="±10%"
    )
    axes.legend(fontsize="small")
    return figure
