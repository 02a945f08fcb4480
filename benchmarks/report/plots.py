"""The plots of every benchmark's record, as read back from its file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.beside.tables import FORECASTS, NAMES
from benchmarks.prompts import ALL
from benchmarks.replay.tables import OURS, is_ours
from benchmarks.report.markdown import in_order
from benchmarks.serve.tables import BASELINE

DPI = 110
COLUMNS = 4
PANEL = 3.2  # inches
CURVE = "mixed"  # the case that runs at every batch size

Rows = Sequence[dict]


def draw(name: str, record: dict, folder: Path) -> None:
    """Writes <name>.png or <name>-<plot>.png, as many as the record has."""
    for plot, figure in DRAWN.get(record["manifest"]["command"], lambda _: ())(record):
        figure.savefig(folder / ("-".join(filter(None, (name, plot))) + ".png"), dpi=DPI)


def single(size: tuple[float, float] = (6, 4), **axes: object) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    panel = figure.add_subplot(**axes)
    panel.grid(alpha=0.3, which="both")
    return figure, panel


def panels(names: Sequence[str], **axes: object) -> tuple[Figure, list[Axes]]:
    rows = -(-len(names) // COLUMNS)
    figure = Figure(figsize=(PANEL * min(COLUMNS, len(names)), PANEL * rows + 0.8), layout="constrained")
    grid = list(figure.subplots(rows, min(COLUMNS, len(names)), squeeze=False).flat)
    for spare in grid[len(names) :]:
        spare.set_visible(False)
    for panel, name in zip(grid, names, strict=False):
        panel.set(title=name, **axes)
        panel.grid(alpha=0.3)
    return figure, grid[: len(names)]


def at_ratios(rows: Rows, **axes: object) -> tuple[Figure, list[tuple[Axes, float, Rows]]]:
    """A panel for each speed ratio, with that and its rows."""
    ratios = in_order(rows, "ratio")
    figure, grid = panels([f"C = {ratio:g}" for ratio in ratios], **axes)
    return figure, [
        (p, c, [row for row in rows if row["ratio"] == c]) for p, c in zip(grid, ratios, strict=True)
    ]


def line(
    panel: Axes, rows: Rows, over: str, label: str, field: str = "tokens_per_step", **style: Any
) -> None:
    """Draws a field with its interval as a band."""
    rows = sorted(rows, key=lambda row: row[over])
    across = [row[over] for row in rows]
    middle, low, high = ends(row[field] for row in rows)
    (drawn,) = panel.plot(across, middle, label=label, **{"marker": ".", **style})
    panel.fill_between(across, low, high, color=drawn.get_color(), alpha=0.12)


def ends(intervals: Iterable[dict]) -> np.ndarray:
    """Middles, lower and upper ends, float; an end that is not known is the middle."""
    found = [
        [of["value"] if of[end] is None else of[end] for end in ("value", "low", "high")] for of in intervals
    ]
    return np.array(found, float).T


def where(rows: Rows, **fields: object) -> list[dict]:
    return [row for row in rows if all(row.get(name) == value for name, value in fields.items())]


# Replay


def replay(record: dict) -> Iterator[tuple[str, Figure]]:
    for name, rows in record["results"].items():
        if name in ("methods", "cold", "paper"):
            yield name, by_nodes(rows)
        elif name in ("size", "language", "entries"):
            yield name, by_size(rows)


def by_nodes(rows: Rows) -> Figure:
    """Tokens per step over drafted nodes: a panel a category (SSSD, figure 4), and one of ours by tier."""
    names, methods = in_order(rows, "category"), in_order(rows, "method")
    ours = [name for name in methods if is_ours({"method": name})]
    tiers = ["our tiers, all answers"] if len(ours) > 1 else []
    figure, grid = panels([*names, *tiers], xscale="log", xlabel="drafted nodes", ylabel="tokens per step")
    for panel, category in zip(grid, names, strict=False):
        for method in (OURS, *(name for name in methods if name not in ours)):
            chosen = where(rows, method=method, category=category)
            line(panel, chosen, "nodes", method, linewidth=2.5 if method == OURS else 1)
    for method in ours if tiers else ():
        line(grid[-1], where(rows, method=method, category=ALL), "nodes", method.removeprefix(f"{OURS}, "))
        grid[-1].legend(fontsize="x-small")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    return figure


def by_size(rows: Rows) -> Figure:
    """Tokens per step over the prior's size; a line for each prior it grows beside, or for whose answers it holds."""
    over = "added" if "added" in rows[0] else "tokens"
    label = next((key for key in ("beside", "answers") if key in rows[0]), None)
    names = in_order(rows, "category")
    figure, grid = panels(names, xlabel=f"tokens of the corpus{' added' if over == 'added' else ''}")
    for panel, category in zip(grid, names, strict=True):
        chosen = where(rows, category=category)
        for value in dict.fromkeys(row.get(label) for row in chosen):
            own = [row for row in chosen if row.get(label) == value]
            line(panel, own, over, f"{label}: {value}" if label else "")
        least = max(min((row[over] for row in chosen if row[over]), default=1), 1)
        panel.set_xscale("symlog", linthresh=least)
        if label:
            panel.legend(fontsize="x-small")
    grid[0].set_ylabel("tokens per step")
    return figure


# Servers


def serve(record: dict) -> Iterator[tuple[str, Figure]]:
    rows = record["summary"]
    if over_batch := where(rows, case=CURVE, category=ALL):
        yield "curve", curve(over_batch)
    if others := [row for row in rows if row["variant"] != BASELINE]:
        yield "cases", ratios(others)
    if predicted := [row for row in rows if row.get("predicted_tokens_per_second")]:
        yield "predicted", predictions(predicted)


def curve(rows: Rows) -> Figure:
    """Throughput over latency, a point a batch size (SSSD, figure 6): up and to the left is better."""
    labels = {
        "xlabel": "mean time between tokens of a request, ms",
        "ylabel": "tokens per second, all requests",
    }
    figure, axes = single((7, 5), **labels)
    for variant in in_order(rows, "variant"):
        own = sorted(where(rows, variant=variant), key=lambda row: row["batch"])
        points = [(1e3 * row["gap_mean"], row["tokens_per_second"]) for row in own]
        axes.plot(*zip(*points, strict=True), marker="o", label=variant)
        for point, row in zip(points, own, strict=True):
            beside = {"textcoords": "offset points", "xytext": (4, 4), "fontsize": "x-small"}
            axes.annotate(str(row["batch"]), point, **beside)
    axes.legend(title="numbers: batch size", fontsize="small")
    return figure


def ratios(rows: Rows) -> Figure:
    """Throughput over plain decoding of every case."""
    variants = in_order(rows, "variant")
    places = list(dict.fromkeys((row["case"], row["category"], row["batch"]) for row in rows))
    figure, axes = single((8, 0.32 * len(places) + 1.5), xlabel="throughput over plain decoding")
    for number, variant in enumerate(variants):
        own = where(rows, variant=variant)
        shift = 0.7 * number / len(variants)
        heights = [-places.index((r["case"], r["category"], r["batch"])) - shift for r in own]
        middle, low, high = ends(row["throughput_ratio"] for row in own)
        errors = [middle - low, high - middle]
        axes.errorbar(middle, heights, xerr=errors, fmt="o", markersize=3, color=f"C{number}", label=variant)
    axes.axvline(1, color="black", linewidth=0.8)
    named = ((case if category == ALL else f"{case}, {category}", batch) for case, category, batch in places)
    labels = [f"{name}, batch {batch}" for name, batch in named]
    axes.set_yticks([-i - 0.3 for i in range(len(places))], labels, fontsize="x-small")
    axes.legend(fontsize="small")
    return figure


def predictions(rows: Rows) -> Figure:
    """Predicted over measured throughput."""
    labels = {"xlabel": "measured tokens/s", "ylabel": "predicted tokens/s"}
    figure, axes = single((5, 5), xscale="log", yscale="log", **labels)
    for variant in in_order(rows, "variant"):
        own = where(rows, variant=variant)
        measured, predicted = ([row[f"{of}tokens_per_second"] for row in own] for of in ("", "predicted_"))
        axes.plot(measured, predicted, "o", label=variant)
    measured = [row["tokens_per_second"] for row in rows]
    limits = np.array([min(measured), max(measured)])
    axes.plot(limits, limits, color="black", linewidth=0.8)
    axes.fill_between(limits, 0.9 * limits, 1.1 * limits, alpha=0.1, color="black", label="±10%")
    axes.legend(fontsize="small")
    return figure


# Costs


def engine(record: dict) -> Iterator[tuple[str, Figure]]:
    """Step time over the prior's size; a line a batch size and percentile."""
    labels = {"xlabel": "tokens of the corpus", "ylabel": "µs per step", "title": "Engine.step, one thread"}
    figure, axes = single(xscale="log", yscale="log", **labels)
    rows = record["results"]
    for batch in in_order(rows, "batch"):
        own = where(rows, batch=batch)
        for name, style in (("p50_us", "-o"), ("p99_us", "--o")):
            label = f"batch {batch}, {own[0]['nodes']} nodes, {name[:3]}"
            axes.plot([row["prior_tokens"] for row in own], [row[name] for row in own], style, label=label)
    axes.set_ylim(bottom=4)  # room for the legend
    axes.legend(loc="lower left", ncols=2, fontsize="small")
    yield "", figure


LATENCIES = {"p50_ms": "p50", "p99_ms": "p99", "p999_ms": "p99.9", "late_p99_ms": "clients late, p99"}


def load(record: dict) -> Iterator[tuple[str, Figure]]:
    """Memory over time; of a search for the limit, latencies over the rate."""
    levels, samples = record["levels"], record["samples"]
    if len(levels) > 1:
        labels = {"xlabel": "steps per second of each stream", "ylabel": "latency of a step, ms"}
        figure, axes = single(xscale="log", yscale="log", **labels)
        for name, label in LATENCIES.items():
            rates, values = zip(*((level["rate"], level[name]) for level in levels), strict=True)
            axes.plot(rates, values, marker=".", label=label)
        axes.axhline(record["manifest"]["settings"]["p99_ms"], color="gray", linewidth=0.8)
        axes.legend(fontsize="small")
    else:
        figure, axes = single(xlabel="minutes", ylabel="resident MiB")
        minutes = [sample["seconds"] / 60 for sample in samples]
        axes.plot(minutes, [sample["resident_bytes"] / 2**20 for sample in samples], label="resident")
        tokens = axes.twinx()
        tokens.plot(
            minutes, [sample["live_tokens"] / 1e6 for sample in samples], color="C1", label="live tier"
        )
        tokens.set(ylabel="million tokens of the live tier")
        for axis in (axes, tokens):
            axis.set_ylim(bottom=0)
        figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    yield "", figure


def roofline(record: dict) -> Iterator[tuple[str, Figure]]:
    labels = {"xlabel": "s_q, the root included", "ylabel": "step time over plain decoding"}
    figure, axes = single(xscale="log", yscale="log", **labels)
    for row in record["results"]:
        lengths = list(map(int, row["cost"]))
        axes.plot(lengths, list(row["cost"].values()), marker=".", label=f"batch {row['batch']}")
    axes.legend()
    yield "", figure


# Drafting beside the target


def pipeline(record: dict) -> Iterator[tuple[str, Figure]]:
    if "misses" in record:
        yield "misses", missed(record["misses"])
    for name, label, axes in (
        ("spreads", "fan_out", ("acceptance", "temperature")),
        ("fallbacks", "fallback", ("batch", "temperature")),
        ("ratios", "batch", ("speed",)),
    ):
        rows = record.get(name, [])
        rows = rows["rows"] if isinstance(rows, dict) else rows
        over = next((axis for axis in axes if len({row.get(axis) for row in rows}) > 1), None)
        if over:
            yield name, speeds(rows, over, label)
    if "exits" in record:
        yield "choices", missed_by_choices(record["exits"]["choices"])
        yield "windows", by_window(record["exits"]["windows"])
    if "ceiling" in record:
        yield "ceiling", ceiling(record["ceiling"]["rows"])


def missed(found: dict) -> Figure:
    """The miss rate over guesses per position, with the power law (SAGUARO, figure 3)."""
    labels = {"xlabel": "guesses per position", "ylabel": "share of steps that miss"}
    figure, axes = single(xscale="log", yscale="log", **labels)
    for kind in in_order(found["rows"], "after"):
        own = where(found["rows"], after=kind)
        across = np.array([row["fan_out"] for row in own])
        middle, low, high = ends(row["miss_rate"] for row in own)
        label = f"after {kind}: r = {found['exponents'][kind]['value']:.2f}"
        (drawn,) = axes.plot(across, middle, "o", label=label)
        axes.fill_between(across, low, high, color=drawn.get_color(), alpha=0.15)
        law = np.polyfit(np.log(across), np.log(middle), 1)
        axes.plot(across, np.exp(np.polyval(law, np.log(across))), color=drawn.get_color())
    axes.legend()
    return figure


def speeds(rows: Rows, over: str, label: str) -> Figure:
    """Throughput over plain decoding and hits (SAGUARO, figures 4 and 6): a row of panels for each pair of models."""
    names = [name for name in ("acceptance", "agreement", "temperature") if name in rows[0] and name != over]
    pairs = list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))
    figure = Figure(figsize=(2 * PANEL, 0.8 * PANEL * len(pairs) + 0.8), layout="constrained")
    for pair, (left, right) in zip(pairs, figure.subplots(len(pairs), 2, squeeze=False), strict=True):
        of_pair = [row for row in rows if tuple(row[name] for name in names) == pair]
        title = ", ".join(f"{name} {value:g}" for name, value in zip(names, pair, strict=True))
        for panel, field, ylabel in (
            (left, "over_plain", "over plain decoding"),
            (right, "hit_rate", "hits"),
        ):
            for value in in_order(of_pair, label):
                own = where(of_pair, **{label: value})
                line(panel, own, over, f"{label.replace('_', ' ')} {value}", field)
            scale = "log" if over in ("speed", "batch") else "linear"
            panel.set(title=title, xlabel=over, ylabel=ylabel, xscale=scale)
            panel.grid(alpha=0.3)
        dotted = {"color": "black", "linestyle": ":", "marker": ""}
        line(left, own, over, "synchronous", "synchronous_over_plain", **dotted)
        left.legend(fontsize="x-small")
    return figure


def ceiling(rows: Rows) -> Figure:
    """Throughput over plain decoding by how good the draft model is, a panel a speed ratio (DOUBLE, table 1 and figure 5)."""
    over = next(name for name in ("acceptance", "agreement") if name in rows[0])
    figure, grid = at_ratios(rows, xlabel=over)
    for panel, ratio, of in grid:
        for who in in_order(rows, "retrieves"):
            line(panel, where(of, retrieves=who), over, who, "over_plain")
        panel.axhline(ratio, color="k", linewidth=0.8)
    grid[0][0].set_ylabel("throughput over plain decoding")
    grid[0][0].legend(title="retrieval by", fontsize="x-small")
    return figure


def missed_by_choices(rows: Rows) -> Figure:
    """MIRROR, figure 7: a panel a speed ratio of the middle model, a line an exit; dashed what the draft model misses by itself."""
    models = sorted({row.get("agreement") for row in rows})
    figure, grid = at_ratios(where(rows, agreement=models[len(models) // 2]), xlabel="kappa", xscale="log")
    for panel, _, of in grid:
        for exit in in_order([row for row in of if row["choices"]], "exit"):
            points = [(row["choices"], 1 - row["hit_rate"]["value"]) for row in where(of, exit=exit)]
            panel.plot(*zip(*points, strict=True), "o-", label=f"exit {exit}")
        (draft,) = where(of, choices=0)
        panel.axhline(1 - draft["hit_rate"]["value"], color="k", linestyle="--", label="draft model")
        panel.set_ylim(0)
    grid[0][0].set_ylabel("misses")
    grid[0][0].legend(fontsize="x-small")
    return figure


def by_window(rows: Rows) -> Figure:
    """MIRROR, figure 3a: above the drafting on the critical path, below tokens per step."""
    ratios = in_order(rows, "ratio")
    figure = Figure(figsize=(PANEL * len(ratios), 2 * PANEL), layout="constrained")
    grid = figure.subplots(2, len(ratios), squeeze=False)
    for column, ratio in zip(grid.T, ratios, strict=True):
        for panel, what in zip(column, ("critical", "tokens_a_step"), strict=True):
            for predicts in in_order(rows, "predicts"):
                own = where(rows, ratio=ratio, predicts=predicts)
                panel.plot([row["window"] for row in own], [row[what] for row in own], label=predicts)
            panel.grid(alpha=0.3)
        column[0].set_title(f"C = {ratio:g}")
        column[1].set_xlabel("gamma")
    grid[0, 0].set_ylabel("drafting a step waits for,\nin target forwards")
    grid[1, 0].set_ylabel("tokens per step")
    grid[0, 0].legend(fontsize="x-small")
    return figure


COLOURS = {name: f"C{at}" for at, name in enumerate(("sssd", "standalone", *FORECASTS))}
BESIDE = {name: (NAMES[name], f"{colour}-") for name, colour in COLOURS.items()} | {
    forecast: (NAMES[forecast], f"{COLOURS[name]}:") for name, forecast in FORECASTS.items()
}


def beside(record: dict) -> Iterator[tuple[str, Figure]]:
    """Throughput over plain decoding by the emulated speed ratio, a panel a batch size."""
    if len({row["speed"] for row in record["rows"]}) < 2:
        return
    batches = in_order(record["rows"], "batch")
    labels = [f"batch {batch}" for batch in batches]
    figure, grid = panels(labels, xlabel="emulated speed ratio", xscale="log")
    for panel, batch in zip(grid, batches, strict=True):
        for variant, (label, style) in BESIDE.items():
            own = where(record["rows"], batch=batch, variant=variant)
            if not own:
                continue
            across, found = [row["speed"] for row in own], [row["over_plain"] for row in own]
            middle, low, high = ends(found)
            panel.plot(across, middle, style, marker=".", label=label)
            if all(of["low"] is not None for of in found) and variant not in FORECASTS.values():
                panel.fill_between(across, low, high, color=style[:2], alpha=0.12)
        panel.axhline(1.0, color="k", linewidth=0.8)
    grid[0].set_ylabel("throughput over plain decoding")
    grid[0].legend(fontsize="x-small")
    yield "ratios", figure


DRAWN: dict[str, Callable[[dict], Iterator[tuple[str, Figure]]]] = {
    "replay": replay, "serve": serve, "engine": engine, "load": load, "roofline": roofline,
    "pipeline": pipeline, "beside": beside,
}  # fmt: skip
