"""The plots of every benchmark's record, as read back from its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.prompts import ALL
from benchmarks.report.beside import FORECASTS, NAMES
from benchmarks.report.markdown import in_order
from benchmarks.report.replaying import OURS, is_ours
from benchmarks.report.serving import BASELINE

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


# Replay


def replay(record: dict) -> Iterator[tuple[str, Figure]]:
    for name, rows in record["results"].items():
        if name in ("methods", "cold"):
            yield name, by_nodes(rows)
        elif name in ("size", "language", "entries"):
            yield name, by_size(rows)


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


def line(
    panel: Axes, rows: Rows, over: str, label: str, field: str = "tokens_per_step", **style: Any
) -> None:
    """A field with its interval as a band."""
    rows = sorted(rows, key=lambda row: row[over])
    across = [row[over] for row in rows]
    middle, low, high = (
        np.array([row[field][end] for row in rows], float) for end in ("value", "low", "high")
    )
    (drawn,) = panel.plot(across, middle, label=label, **{"marker": ".", **style})
    panel.fill_between(across, low, high, color=drawn.get_color(), alpha=0.12)


def by_nodes(rows: Rows) -> Figure:
    """Tokens a step over drafted nodes: a panel a category (SSSD, figure 4), and one of ours by tier."""
    names, methods = in_order(rows, "category"), in_order(rows, "method")
    ours = [name for name in methods if is_ours({"method": name})]
    tiers = ["our tiers, all answers"] if len(ours) > 1 else []
    figure, grid = panels([*names, *tiers], xscale="log", xlabel="drafted nodes", ylabel="tokens a step")
    for panel, category in zip(grid, names, strict=False):
        for method in (OURS, *(name for name in methods if name not in ours)):
            chosen = [row for row in rows if (row["method"], row["category"]) == (method, category)]
            line(panel, chosen, "nodes", method, linewidth=2.5 if method == OURS else 1)
    for method in ours if tiers else ():
        chosen = [row for row in rows if (row["method"], row["category"]) == (method, ALL)]
        line(grid[-1], chosen, "nodes", method.removeprefix(f"{OURS}, "))
        grid[-1].legend(fontsize="x-small")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    return figure


def by_size(rows: Rows) -> Figure:
    """Tokens a step over the prior's size; a line for each prior it grows beside, or for whose answers it holds."""
    over = "added" if "added" in rows[0] else "tokens"
    label = next((key for key in ("beside", "answers") if key in rows[0]), None)
    names = in_order(rows, "category")
    figure, grid = panels(names, xlabel=f"tokens of the prior{' added' if over == 'added' else ''}")
    for panel, category in zip(grid, names, strict=True):
        chosen = [row for row in rows if row["category"] == category]
        for value in dict.fromkeys(row.get(label) for row in chosen):
            own = [row for row in chosen if row.get(label) == value]
            line(panel, own, over, f"{label}: {value}" if label else "")
        panel.set_xscale(
            "symlog", linthresh=max(min((row[over] for row in chosen if row[over]), default=1), 1)
        )
        if label:
            panel.legend(fontsize="x-small")
    grid[0].set_ylabel("tokens a step")
    return figure


# Servers


def serve(record: dict) -> Iterator[tuple[str, Figure]]:
    rows = record["summary"]
    over_batch = [row for row in rows if row["case"] == CURVE and row["category"] == ALL]
    if over_batch:
        yield "curve", curve(over_batch)
    others = [row for row in rows if row["variant"] != BASELINE]
    if others:
        yield "cases", ratios(others)
    predicted = [row for row in rows if row.get("predicted_tokens_per_second")]
    if predicted:
        yield "predicted", predictions(predicted)


def curve(rows: Rows) -> Figure:
    """Throughput over latency, a point a batch size (SSSD, figure 6): up and to the left is better."""
    figure, axes = single(
        (7, 5), xlabel="mean time between tokens of a request, ms", ylabel="tokens a second, all requests"
    )
    for variant in in_order(rows, "variant"):
        own = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["batch"])
        across, up = [1e3 * row["gap_mean"] for row in own], [row["tokens_per_second"] for row in own]
        axes.plot(across, up, marker="o", label=variant)
        for x, y, row in zip(across, up, own, strict=True):
            axes.annotate(
                str(row["batch"]), (x, y), textcoords="offset points", xytext=(4, 4), fontsize="x-small"
            )
    axes.legend(title="numbers: batch size", fontsize="small")
    return figure


def ratios(rows: Rows) -> Figure:
    """Throughput over plain decoding of every case."""
    variants = in_order(rows, "variant")
    places = list(dict.fromkeys((row["case"], row["category"], row["batch"]) for row in rows))
    figure, axes = single((8, 0.32 * len(places) + 1.5), xlabel="throughput over plain decoding")
    for number, variant in enumerate(variants):
        own = [row for row in rows if row["variant"] == variant]
        heights = [
            -places.index((r["case"], r["category"], r["batch"])) - 0.7 * number / len(variants) for r in own
        ]
        found = [row["throughput_ratio"] for row in own]
        middle, low, high = (
            np.array([ratio["value"] if ratio[end] is None else ratio[end] for ratio in found])
            for end in ("value", "low", "high")
        )
        errors = [middle - low, high - middle]
        axes.errorbar(middle, heights, xerr=errors, fmt="o", markersize=3, color=f"C{number}", label=variant)
    axes.axvline(1, color="black", linewidth=0.8)
    labels = [
        f"{case}{'' if category == ALL else ', ' + category}, batch {batch}"
        for case, category, batch in places
    ]
    axes.set_yticks([-i - 0.3 for i in range(len(places))], labels, fontsize="x-small")
    axes.legend(fontsize="small")
    return figure


def predictions(rows: Rows) -> Figure:
    """Predicted over measured throughput."""
    figure, axes = single(
        (5, 5), xlabel="measured tokens/s", ylabel="predicted tokens/s", xscale="log", yscale="log"
    )
    for variant in in_order(rows, "variant"):
        own = [row for row in rows if row["variant"] == variant]
        measured, predicted = (
            [row[key] for row in own] for key in ("tokens_per_second", "predicted_tokens_per_second")
        )
        axes.plot(measured, predicted, "o", label=variant)
    measured = [row["tokens_per_second"] for row in rows]
    ends = np.array([min(measured), max(measured)])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, alpha=0.1, color="black", label="±10%")
    axes.legend(fontsize="small")
    return figure


# Costs


def engine(record: dict) -> Iterator[tuple[str, Figure]]:
    """Step time over the prior's size; a line a batch size and percentile."""
    figure, axes = single(
        xlabel="tokens of the prior",
        ylabel="µs a step",
        xscale="log",
        yscale="log",
        title="Engine.step, one thread",
    )
    rows = record["results"]
    for batch in in_order(rows, "batch"):
        own = [row for row in rows if row["batch"] == batch]
        for name, style in (("p50_us", "-o"), ("p99_us", "--o")):
            label = f"batch {batch}, {own[0]['nodes']} nodes, {name[:3]}"
            axes.plot([row["prior_tokens"] for row in own], [row[name] for row in own], style, label=label)
    axes.set_ylim(bottom=4)  # room for the legend
    axes.legend(loc="lower left", ncols=2, fontsize="small")
    yield "", figure


def load(record: dict) -> Iterator[tuple[str, Figure]]:
    """Memory over time; of a search for the limit, latencies over the rate."""
    if len(record["levels"]) > 1:
        figure, axes = single(
            xlabel="steps a second of each stream", ylabel="latency of a step, ms", xscale="log", yscale="log"
        )
        rates = [level["rate"] for level in record["levels"]]
        for name, label in (
            ("p50_ms", "p50"),
            ("p99_ms", "p99"),
            ("p999_ms", "p99.9"),
            ("late_p99_ms", "clients late, p99"),
        ):
            axes.plot(rates, [level[name] for level in record["levels"]], marker=".", label=label)
        axes.axhline(record["manifest"]["settings"]["p99_ms"], color="gray", linewidth=0.8)
        axes.legend(fontsize="small")
    else:
        figure, axes = single(xlabel="minutes", ylabel="resident MiB")
        minutes = [sample["seconds"] / 60 for sample in record["samples"]]
        axes.plot(
            minutes, [sample["resident_bytes"] / 2**20 for sample in record["samples"]], label="resident"
        )
        tokens = axes.twinx()
        held = [sample["live_tokens"] / 1e6 for sample in record["samples"]]
        tokens.plot(minutes, held, color="C1", label="live tier")
        tokens.set(ylabel="million tokens of the live tier")
        for axis in (axes, tokens):
            axis.set_ylim(bottom=0)
        figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    yield "", figure


def roofline(record: dict) -> Iterator[tuple[str, Figure]]:
    figure, axes = single(
        xlabel="s_q, the root included", ylabel="step time over plain decoding", xscale="log", yscale="log"
    )
    for row in record["results"]:
        axes.plot(
            list(map(int, row["cost"])), list(row["cost"].values()), marker=".", label=f"batch {row['batch']}"
        )
    axes.legend()
    yield "", figure


# Drafting beside the target


def pipeline(record: dict) -> Iterator[tuple[str, Figure]]:
    if "misses" in record:
        yield "misses", missed(record["misses"])
    for name, label, axes in (
        ("spreads", "fan_out", ("acceptance", "temperature")),
        ("sources", "guesses_from", ("temperature",)),
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
    """The miss rate over guesses a position, with the power law (SAGUARO, figure 3)."""
    figure, axes = single(
        xlabel="guesses a position", ylabel="share of steps that miss", xscale="log", yscale="log"
    )
    for kind in in_order(found["rows"], "after"):
        own = [row for row in found["rows"] if row["after"] == kind]
        across = np.array([row["fan_out"] for row in own])
        middle, low, high = (
            np.array([row["miss_rate"][end] for row in own]) for end in ("value", "low", "high")
        )
        label = f"after {kind}: r = {found['exponents'][kind]['value']:.2f}"
        (drawn,) = axes.plot(across, middle, "o", label=label)
        axes.fill_between(across, low, high, color=drawn.get_color(), alpha=0.15)
        line = np.polyfit(np.log(across), np.log(middle), 1)
        axes.plot(across, np.exp(np.polyval(line, np.log(across))), color=drawn.get_color())
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
                own = [row for row in of_pair if row[label] == value]
                line(panel, own, over, f"{label.replace('_', ' ')} {value}", field)
            scale = "log" if over in ("speed", "batch") else "linear"
            panel.set(title=title, xlabel=over, ylabel=ylabel, xscale=scale)
            panel.grid(alpha=0.3)
        line(
            left, own, over, "synchronous", "synchronous_over_plain", color="black", linestyle=":", marker=""
        )
        left.legend(fontsize="x-small")
    return figure


def ceiling(rows: Rows) -> Figure:
    """Throughput over plain decoding by how good the draft model is, a panel a speed ratio (DOUBLE, table 1 and figure 5)."""
    over = next(name for name in ("acceptance", "agreement") if name in rows[0])
    ratios = in_order(rows, "ratio")
    figure, grid = panels([f"C = {ratio:g}" for ratio in ratios], xlabel=over)
    for panel, ratio in zip(grid, ratios, strict=True):
        for who in in_order(rows, "retrieves"):
            own = [row for row in rows if (row["ratio"], row["retrieves"]) == (ratio, who)]
            line(panel, own, over, who, "over_plain")
        panel.axhline(ratio, color="k", linewidth=0.8)
    grid[0].set_ylabel("throughput over plain decoding")
    grid[0].legend(title="retrieval by", fontsize="x-small")
    return figure


def missed_by_choices(rows: Rows) -> Figure:
    """MIRROR, figure 7: a panel a speed ratio of the middle model, a line an exit; dashed what the draft model misses by itself."""
    models = [row.get("agreement") for row in rows]
    rows = [row for row in rows if row.get("agreement") == sorted(set(models))[len(set(models)) // 2]]
    figure, grid = panels(
        [f"C = {ratio:g}" for ratio in in_order(rows, "ratio")], xlabel="kappa", xscale="log"
    )
    for panel, ratio in zip(grid, in_order(rows, "ratio"), strict=True):
        of = [row for row in rows if row["ratio"] == ratio]
        for exit in in_order([row for row in of if row["choices"]], "exit"):
            own = [row for row in of if row["exit"] == exit]
            missed = [1 - row["hit_rate"]["value"] for row in own]
            panel.plot([row["choices"] for row in own], missed, "o-", label=f"exit {exit}")
        draft = next(row for row in of if not row["choices"])
        panel.axhline(1 - draft["hit_rate"]["value"], color="k", linestyle="--", label="draft model")
        panel.set_ylim(0)
    grid[0].set_ylabel("misses")
    grid[0].legend(fontsize="x-small")
    return figure


def by_window(rows: Rows) -> Figure:
    """MIRROR, figure 3a: above the drafting on the critical path, below tokens a step."""
    ratios = in_order(rows, "ratio")
    figure = Figure(figsize=(PANEL * len(ratios), 2 * PANEL), layout="constrained")
    grid = figure.subplots(2, len(ratios), squeeze=False)
    for column, ratio in zip(grid.T, ratios, strict=True):
        for panel, what in zip(column, ("critical", "tokens_a_step"), strict=True):
            for predicts in in_order(rows, "predicts"):
                own = [row for row in rows if (row["ratio"], row["predicts"]) == (ratio, predicts)]
                panel.plot([row["window"] for row in own], [row[what] for row in own], label=predicts)
            panel.grid(alpha=0.3)
        column[0].set_title(f"C = {ratio:g}")
        column[1].set_xlabel("gamma")
    grid[0, 0].set_ylabel("drafting a step waits for,\nin target forwards")
    grid[1, 0].set_ylabel("tokens a step")
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
    figure, grid = panels(
        [f"batch {batch}" for batch in batches], xlabel="EMULATED speed ratio", xscale="log"
    )
    for panel, batch in zip(grid, batches, strict=True):
        for variant, (label, style) in BESIDE.items():
            own = [row for row in record["rows"] if (row["batch"], row["variant"]) == (batch, variant)]
            if not own:
                continue
            across = [row["speed"] for row in own]
            middle, low, high = ([row["over_plain"][end] for row in own] for end in ("value", "low", "high"))
            panel.plot(across, middle, style, marker=".", label=label)
            if None not in low and variant not in FORECASTS.values():
                panel.fill_between(across, low, high, color=style[:2], alpha=0.12)
        panel.axhline(1.0, color="k", linewidth=0.8)
    grid[0].set_ylabel("throughput over plain decoding")
    grid[0].legend(fontsize="x-small")
    yield "ratios", figure


DRAWN: dict[str, Callable[[dict], Iterator[tuple[str, Figure]]]] = {
    "replay": replay, "serve": serve, "engine": engine, "load": load, "roofline": roofline,
    "pipeline": pipeline, "beside": beside,
}  # fmt: skip
