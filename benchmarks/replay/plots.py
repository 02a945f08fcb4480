"""Replay's results as pictures; `results` as read back from the JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.prompts import ALL
from benchmarks.replay.methods import OURS, OWN

COLUMNS = 4
PANEL = 3.2  # inches


def draw(results: dict[str, list[dict]], beside: Path) -> None:
    """One picture an experiment: <name of the JSON file>-<experiment>.png."""
    for name, records in results.items():
        if name in DRAWN:
            DRAWN[name](records).savefig(beside.with_name(f"{beside.stem}-{name}.png"), dpi=110)


def panels(names: Sequence[str], **axes: object) -> tuple[Figure, list[Axes]]:
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(PANEL * min(COLUMNS, len(names)), PANEL * rows + 0.8), layout="constrained")
    grid = figure.subplots(rows, min(COLUMNS, len(names)), squeeze=False).flat
    used = list(grid)[: len(names)]
    for spare in list(grid)[len(names) :]:
        spare.set_visible(False)
    for panel, name in zip(used, names, strict=True):
        panel.set(title=name, **axes)
        panel.grid(alpha=0.3)
    return figure, used


def line(panel: Axes, records: Sequence[dict], over: str, label: str, **style: object) -> None:
    """Tokens a step with its interval as a band."""
    rows = sorted(records, key=lambda record: record[over])
    across = [row[over] for row in rows]
    (drawn,) = panel.plot(
        across, [row["tokens_per_step"]["value"] for row in rows], label=label, marker=".", **style
    )
    low, high = (np.array([row["tokens_per_step"][end] for row in rows], float) for end in ("low", "high"))
    panel.fill_between(across, low, high, alpha=0.12, color=drawn.get_color())


def categories_of(records: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(record["category"] for record in records))


def by_nodes(records: Sequence[dict]) -> Figure:
    """Tokens a step over nodes, a panel a category; ours with its tiers apart in the last panel (SSSD, figure 4)."""
    names = categories_of(records)
    tiers = [name for name in OWN if any(record["method"] == name for record in records)]
    figure, grid = panels(
        [*names, *(["our tiers, all answers"] if len(tiers) > 1 else [])],
        xscale="log",
        xlabel="drafted nodes",
        ylabel="tokens a step",
    )
    peers = [name for name in dict.fromkeys(r["method"] for r in records) if name not in OWN]
    for panel, category in zip(grid, names, strict=False):
        for method in (OURS, *peers):
            chosen = [r for r in records if (r["method"], r["category"]) == (method, category)]
            line(panel, chosen, "nodes", method, linewidth=2.5 if method == OURS else 1)
    if len(tiers) > 1:
        for method in tiers:
            chosen = [r for r in records if (r["method"], r["category"]) == (method, ALL)]
            line(grid[-1], chosen, "nodes", method.removeprefix(f"{OURS}, "))
        grid[-1].legend(fontsize="x-small")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    return figure


def by_size(records: Sequence[dict]) -> Figure:
    """Tokens a step over the prior's size; a line for each prior it grows beside, or for whose answers it holds."""
    over = "added" if "added" in records[0] else "tokens"
    names = categories_of(records)
    figure, grid = panels(names, xlabel=f"tokens of the prior{' added' if over == 'added' else ''}")
    for panel, category in zip(grid, names, strict=True):
        chosen = [record for record in records if record["category"] == category]
        label = next((key for key in ("beside", "answers") if isinstance(chosen[0].get(key), str)), None)
        for value in dict.fromkeys(record.get(label) for record in chosen):
            rows = [record for record in chosen if record.get(label) == value]
            line(panel, rows, over, f"{label}: {value}" if label else "")
        panel.set_xscale("symlog", linthresh=max(min(r[over] for r in chosen if r[over]), 1))
        if label:
            panel.legend(fontsize="x-small")
    grid[0].set_ylabel("tokens a step")
    return figure


DRAWN = {"methods": by_nodes, "cold": by_nodes, "size": by_size, "language": by_size, "entries": by_size}
