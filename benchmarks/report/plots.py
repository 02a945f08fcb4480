"""The plots of every benchmark's record, as read back from its file. Each is readable at its own width, about 800 pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.beside.tables import FORECASTS, NAMES
from benchmarks.prompts import ALL
from benchmarks.replay.tables import MIDDLE, OURS, is_ours
from benchmarks.report.markdown import in_order
from benchmarks.serve.tables import BASELINE, PRIMARY, divisible, is_lossy

DPI = 110
WIDTH, PANEL = 7.2, 2.5  # inches: of a plot, and the height of one of its panels
COLUMNS = 3
CURVE = "mixed"  # the case that runs at every batch size
EDGES = (0.25, 10.0)  # of a ratio's axis: an interval is cut there, and an arrow says so

Rows = Sequence[dict]


def draw(name: str, record: dict, folder: Path) -> None:
    """Writes <name>.png or <name>-<plot>.png, as many as the record has."""
    for plot, figure in DRAWN.get(record["manifest"]["command"], lambda _: ())(record):
        figure.savefig(folder / ("-".join(filter(None, (name, plot))) + ".png"), dpi=DPI)


def single(height: float = 4.2, **axes: object) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panel = figure.add_subplot(**axes)
    panel.grid(alpha=0.3)
    return figure, panel


def panels(names: Sequence[str], **axes: object) -> tuple[Figure, list[Axes]]:
    """A panel for each name; the axes' names stand at the edge of the grid, the legend in its first spare place or below."""
    columns = min(COLUMNS, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(WIDTH if columns > 1 else 5, PANEL * rows + 0.8), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in grid[len(names) :]:
        spare.set_axis_off()
    for at, (panel, name) in enumerate(zip(grid, names, strict=False)):
        edge = {"xlabel": at + columns >= len(names), "ylabel": at % columns == 0}
        panel.set(title=name, **{key: value for key, value in axes.items() if edge.get(key, True)})
        panel.grid(alpha=0.3)
    return figure, grid[: len(names)]


def legend_of(figure: Figure, panel: Axes, **more: Any) -> None:
    """One legend for all panels: in the grid's spare places, else below it."""
    spare = [axes for axes in figure.axes if not axes.axison]
    style = {"fontsize": "small", "frameon": False, **more}
    if spare:
        spare[0].legend(*panel.get_legend_handles_labels(), loc="upper left", **style).set_in_layout(False)
    else:
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, **style)


def ticked(axis: Axis, values: Iterable[float]) -> None:
    """Ticks at these values alone, as far as they are in view. A logarithmic axis has powers of ten otherwise."""
    low, high = axis.get_view_interval()
    found = sorted({value for value in values if low <= value <= high})
    axis.set_ticks(found, [f"{value:g}" for value in found])
    axis.set_ticks([], minor=True)


def at_ratios(rows: Rows, **axes: object) -> tuple[Figure, list[tuple[Axes, float, Rows]]]:
    """A panel for each speed ratio, with that and its rows."""
    ratios = in_order(rows, "ratio")
    figure, grid = panels([f"C = {ratio:g}" for ratio in ratios], **axes)
    return figure, [
        (p, c, [row for row in rows if row["ratio"] == c]) for p, c in zip(grid, ratios, strict=True)
    ]


def line(
    panel: Axes,
    rows: Rows,
    over: str,
    label: str,
    field: str = "tokens_per_step",
    band: bool = True,
    **style: Any,
) -> None:
    """Draws a field, with its interval as a band."""
    rows = sorted(rows, key=lambda row: row[over])
    across = [row[over] for row in rows]
    middle, low, high = ends(row[field] for row in rows)
    (drawn,) = panel.plot(across, middle, label=label, **{"marker": ".", **style})
    if band:
        panel.fill_between(across, low, high, color=drawn.get_color(), alpha=0.12, linewidth=0)


def forest(found: Mapping[str, Mapping[str, dict]], edges: tuple[float, float], **axes: object) -> Figure:
    """Intervals of several series at the same places, the best place on top. found: by series and place."""
    best: dict[str, float] = {}
    for own in found.values():
        for place, interval in own.items():
            best[place] = max(best.get(place, 0), interval["value"])
    places, thick = sorted(best, key=best.__getitem__), max(0.1 + 0.11 * len(found), 0.3)
    figure, panel = single(thick * len(places) + 1.3, xlim=edges, **axes)
    for number, (label, own) in enumerate(found.items()):
        shift = 0.35 - 0.7 * number / max(len(found) - 1, 1)
        heights = np.array([places.index(place) + shift for place in own])
        colour = dict(SERVED.values()).get(label, f"C{number}")
        middle, low, high = ends(own.values())
        style = {"fmt": "o", "markersize": 4, "color": colour, "label": label}
        panel.errorbar(middle, heights, xerr=[middle - low, high - middle], **style)
        for marker, edge, cut in (("<", edges[0], low < edges[0]), (">", edges[1], high > edges[1])):
            if cut.any():
                panel.plot(np.full(cut.sum(), edge), heights[cut], marker, color=colour, clip_on=False)
    panel.set_yticks(range(len(places)), places)
    panel.grid(visible=False, axis="y")
    for between in range(len(places) - 1):
        panel.axhline(between + 0.5, color="0.9", linewidth=0.8)
    panel.set_ylim(-0.5, len(places) - 0.5)
    figure.legend(loc="outside upper center", ncols=2, fontsize="small", frameon=False)
    return figure


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
            if any(row["method"] != OURS and is_ours(row) for row in rows):
                yield "sources", by_source(where(rows, nodes=MIDDLE))
        elif name in ("size", "language", "entries"):
            yield name, by_size(rows)


def by_nodes(rows: Rows) -> Figure:
    """Tokens per step over drafted nodes: a panel a category (SSSD, figure 4)."""
    names, methods = in_order(rows, "category"), in_order(rows, "method")
    figure, grid = panels(names, xscale="log", xlabel="drafted nodes", ylabel="tokens per step")
    for panel, category in zip(grid, names, strict=True):
        for method in (OURS, *(name for name in methods if not name.startswith(OURS))):
            ours = method == OURS
            chosen = where(rows, method=method, category=category)
            line(panel, chosen, "nodes", method, band=ours, linewidth=2.5 if ours else 1)
        ticked(panel.xaxis, [row["nodes"] for row in rows])
    legend_of(figure, grid[0])
    return figure


SOURCES = {
    OURS: "all together",
    **{f"{OURS}, {name} alone": f"{name} alone" for name in ("session", "live", "corpus")},
}


def by_source(rows: Rows) -> Figure:
    """Tokens per step from each of the datastore's sources alone, by category."""
    found = {
        label: {row["category"]: row["tokens_per_step"] for row in where(rows, method=method)}
        for method, label in SOURCES.items()
    }
    most = max(value["high"] for value in found["all together"].values())
    return forest(found, (1.0, most), xlabel=f"tokens per step, {MIDDLE} drafted nodes")


def by_size(rows: Rows) -> Figure:
    """Tokens per step while a corpus grows: a line a category, or two panels where there are several such corpora."""
    over = "added" if "added" in rows[0] else "tokens"
    label = next((key for key in ("beside", "answers") if key in rows[0]), None)
    labels = {
        "xlabel": f"tokens of the corpus{' added' if over == 'added' else ''}",
        "ylabel": "tokens per step",
    }
    if label is None:
        figure, panel = single(**labels)
        grid = [panel]
        lines_with_names(panel, rows, over)
    else:
        figure, grid = panels(list(dict.fromkeys((most_moved(rows, label), rows[-1]["category"]))), **labels)
        for panel in grid:
            for value in in_order(rows, label):
                own = where(rows, category=panel.get_title(), **{label: value})
                line(panel, own, over, f"{label}: {value}")
        legend_of(figure, grid[0])
    for panel in grid:
        panel.set_xscale("symlog", linthresh=max(min(row[over] for row in rows if row[over]), 100))
        ticked(panel.xaxis, (0, 1_000, 10_000, 100_000))
    return figure


def most_moved(rows: Rows, label: str) -> str:
    """The category whose tokens per step depend most on the corpus that grows."""
    first = where(rows, **{label: rows[0][label]})

    def span(category: str) -> float:
        values = [row["tokens_per_step"]["value"] for row in where(first, category=category)]
        return max(values) - min(values)

    return max(in_order(first, "category"), key=span)


def lines_with_names(panel: Axes, rows: Rows, over: str) -> None:
    """Each category's name stands at the end of its line, higher where it would lie on another's."""
    found = []
    for category in in_order(rows, "category"):
        own, whole = where(rows, category=category), category == ALL
        line(panel, own, over, category, band=whole, linewidth=2.5 if whole else 1)
        found.append((own[-1]["tokens_per_step"]["value"], category, panel.lines[-1].get_color()))
    at = 0.0
    for value, category, colour in sorted(found):
        at = max(value, at + 0.12)
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (4, 0)}
        panel.annotate(category, (1, at), fontsize="small", color=colour, va="center", **place)


# Servers


def serve(record: dict) -> Iterator[tuple[str, Figure]]:
    rows = record["summary"]
    over_batch = where(rows, case=CURVE, category=ALL)
    if len(in_order(over_batch, "batch")) > 1:
        yield "curve", curve(over_batch)
        yield "batches", batches([row for row in over_batch if row["variant"] != BASELINE])
    elif others := [row for row in rows if row["variant"] != BASELINE and not is_lossy(row)]:
        yield "cases", ratios(others)
    divided = [row for row in divisible(rows) if row["breakdown"] or row["variant"] == BASELINE]
    if any(row["breakdown"] for row in divided):
        yield "steps", steps([row for row in divided if not row["variant"].startswith("control")])


SERVED = {
    BASELINE: ("plain decoding", "0.4"), "ngram": ("SGLang's NGRAM", "C1"), "ngram_corpus": ("NGRAM with the corpus", "C3"),
    "sssd": ("SSSD with a corpus", "C0"), "sssd_cold": ("SSSD, empty datastore", "C2"), "sssd_grpc": ("SSSD over gRPC", "C4"),
    "sssd_static": ("SSSD, empty, always all rows", "C8"), "sssd_crowded": ("SSSD, unrelated corpora too", "C5"),
    "control_adaptive": ("drafts that never match", "0.6"),
}  # fmt: skip


def look(variant: str) -> tuple[str, str | None]:
    """Name and colour; one that is not above has the next colour."""
    return SERVED.get(variant, (variant, None))


def curve(rows: Rows) -> Figure:
    """Throughput over latency, a point a batch size (SSSD, figure 6): up and to the left is better."""
    labels = {
        "xlabel": "mean time between tokens of a request, ms (left is better)",
        "ylabel": "tokens per second, all requests",
    }
    figure, axes = single(4.8, **labels)
    for variant in in_order(rows, "variant"):
        own = sorted(where(rows, variant=variant), key=lambda row: row["batch"])
        points = [(1e3 * row["gap_mean"], row["tokens_per_second"]) for row in own]
        axes.plot(*zip(*points, strict=True), marker="o", color=look(variant)[1], label=look(variant)[0])
        for point, row in zip(points, own, strict=True):
            below = (6, -12) if variant == BASELINE else (6, 4)
            axes.annotate(
                str(row["batch"]), point, textcoords="offset points", xytext=below, fontsize="small"
            )
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.legend(title="numbers: batch size", fontsize="small", loc="upper right")
    return figure


def batches(rows: Rows) -> Figure:
    """Throughput over plain decoding by batch size."""
    labels = {"xlabel": "requests in the batch", "ylabel": "throughput over plain decoding"}
    figure, axes = single(xscale="log", **labels)
    for number, variant in enumerate(in_order(rows, "variant")):
        own = where(rows, variant=variant)
        aside = 1.04 ** (2 * number - 1)  # so that no interval lies on another
        label, colour = look(variant)
        bars(axes, [row["batch"] * aside for row in own], own, "throughput_ratio", color=colour, label=label)
    axes.axhline(1, color="black", linewidth=0.8, label="break-even: plain decoding")
    ticked(axes.xaxis, [row["batch"] for row in rows])
    axes.set_ylim(0)
    axes.legend(fontsize="small")
    return figure


def bars(panel: Axes, across: Sequence[float], rows: Rows, field: str, **style: Any) -> None:
    """Draws a field with its interval as an error bar at each point."""
    middle, low, high = ends(row[field] for row in rows)
    panel.errorbar(across, middle, yerr=[middle - low, high - middle], marker=".", capsize=3, **style)


def ratios(rows: Rows) -> Figure:
    """Throughput over plain decoding of every case."""
    several = len(in_order(rows, "batch")) > 1
    found: dict[str, dict[str, dict]] = {}
    for row in sorted(rows, key=lambda row: row["variant"] not in PRIMARY):
        place = f"{row['case']}, batch {row['batch']}" if several else row["category"]
        place = f"all {row['case']}" if place == ALL else place
        found.setdefault(look(row["variant"])[0], {})[place] = row["throughput_ratio"]
    batch = "" if several else f" at batch {rows[0]['batch']}"
    labels = {"xscale": "log", "xlabel": f"throughput over plain decoding{batch}, with 95% intervals"}
    figure = forest(found, EDGES, **labels)
    (axes,) = figure.axes
    axes.axvline(1, color="black", linewidth=0.8)
    ticked(axes.xaxis, (0.25, 0.5, 1, 2, 4, 8))
    return figure


def steps(rows: Rows) -> Figure:
    """What a decode step takes: plain decoding as a whole, SSSD in its parts."""
    rows = sorted(rows, key=lambda row: (row["batch"], row["variant"] != BASELINE))
    batches = in_order(rows, "batch")
    of = "" if len(batches) > 1 else f" at batch {batches[0]}"
    names = [look(row["variant"])[0] + ("" if of else f", batch {row['batch']}") for row in rows]
    figure, axes = single(
        0.3 * len(rows) + 1.1, xlabel=f"milliseconds per decode step{of}, and tokens per request"
    )
    total = np.array([row["milliseconds_per_step"] for row in rows])
    left = np.zeros(len(rows))
    for part in next(row["breakdown"] for row in rows if row["breakdown"]):
        width = total * [row["breakdown"].get(part, 0) for row in rows]
        if width.any():
            axes.barh(names, width, left=left, label=part)
            left += width
    axes.barh(names, total - left, left=left, color=SERVED[BASELINE][1], label="undivided")
    for at, row in enumerate(rows):
        text = f" {total[at]:.0f} ms, {row['tokens_per_step']['value']:.2f} tokens"
        axes.annotate(text, (total[at], at), va="center", fontsize="small")
    axes.set(xlim=(0, 1.5 * total.max()), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(visible=False)
    figure.legend(loc="outside upper center", ncols=7, fontsize="small", frameon=False)
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
        axes.axhline(
            record["manifest"]["settings"]["p99_ms"], color="gray", linewidth=0.8, label="limit of p99"
        )
        ticked(axes.xaxis, 2.0 ** np.arange(-4, 10))
        ticked(axes.yaxis, 2.0 ** np.arange(-4, 16))
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
    """What a step costs by its rows, which is also how many tokens it has to yield to be worth that."""
    made = record["manifest"]["settings"]
    of = f"calculated for {made['teraflops']:g} TFLOP/s and {made['bandwidth']:g} TB/s"
    labels = {"xlabel": f"rows checked for each request ({of})", "ylabel": "step time over plain decoding"}
    figure, axes = single(xscale="log", yscale="log", **labels)
    for row in record["results"]:
        lengths = list(map(int, row["cost"]))
        axes.plot(lengths, list(row["cost"].values()), marker=".", label=f"batch {row['batch']}")
    ticked(axes.xaxis, lengths)
    ticked(axes.yaxis, (1, 2, 4, 8, 16))
    axes.legend(fontsize="small")
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
    if "timelines" in record:
        yield "timelines", timelines(record["timelines"])
    if "ceiling" in record:
        yield "ceiling", ceiling(record["ceiling"]["rows"])


VERIFIED = {
    "hit": "speculation cache hit",
    "waited": "waited for the draft",
    "fell back": "the datastore's tree",
    "nothing": "no draft",
}
VERIFIED_IN = dict(zip(VERIFIED, ("tab:green", "tab:orange", "tab:blue", "0.75"), strict=True))  # colours


def timelines(rows: Rows) -> Figure:
    """Two strips for each method: the target's forwards, in the colour of what was verified and with the tokens that a step gave, and
    the draft model's."""
    figure, panel = single(0.62 * len(rows) + 1.2, xlabel="milliseconds", xlim=(0, rows[0]["milliseconds"]))
    panel.grid(visible=False)
    for at, row in enumerate(reversed(rows)):
        for begin, end, kind, tokens in row["target"]:
            panel.broken_barh([(begin, end - begin)], (at, 0.42), color=VERIFIED_IN[kind], edgecolor="white")
            panel.text((begin + end) / 2, at + 0.2, str(tokens), ha="center", va="center", fontsize="x-small")
        bars = [(begin, end - begin) for begin, end in row["draft"]]
        panel.broken_barh(bars, (at - 0.3, 0.24), color="tab:purple", edgecolor="white", linewidth=0.5)
        total = f"{row['tokens']} tokens"
        panel.text(1.01, at + 0.1, total, transform=panel.get_yaxis_transform(), va="center")
    panel.set_yticks(np.arange(len(rows)) + 0.1, [row["method"] for row in reversed(rows)])
    handles = [Patch(color=VERIFIED_IN[kind], label=name) for kind, name in VERIFIED.items()]
    handles.append(Patch(color="tab:purple", label="draft model's forward"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    return figure


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
        ticked(axes.xaxis, across)
    ticked(axes.yaxis, (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8))
    axes.legend()
    return figure


def speeds(rows: Rows, over: str, label: str) -> Figure:
    """Throughput over plain decoding and hits (SAGUARO, figures 4 and 6): a row of panels for each pair of models."""
    names = [name for name in ("acceptance", "agreement", "temperature") if name in rows[0] and name != over]
    pairs = list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))
    figure = Figure(figsize=(WIDTH, PANEL * len(pairs) + 0.8), layout="constrained")
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
            panel.set(title=title, xlabel=over, ylabel=ylabel)
            if over in ("speed", "batch"):
                panel.set_xscale("log")
                ticked(panel.xaxis, [row[over] for row in rows])
            panel.grid(alpha=0.3)
        dotted = {"color": "black", "linestyle": ":", "marker": ""}
        line(left, own, over, "synchronous", "synchronous_over_plain", **dotted)
    legend_of(figure, left)
    return figure


def ceiling(rows: Rows) -> Figure:
    """Throughput over plain decoding by how good the draft model is, a panel a speed ratio (DOUBLE, table 1 and figure 5)."""
    over = next(name for name in ("acceptance", "agreement") if name in rows[0])
    figure, grid = at_ratios(rows, xlabel=over, ylabel="throughput over plain decoding")
    for panel, ratio, of in grid:
        for who in in_order(rows, "retrieves"):
            line(panel, where(of, retrieves=who), over, who, "over_plain")
        panel.axhline(ratio, color="k", linewidth=0.8)
    legend_of(figure, grid[0][0], title="retrieval by; the line: the ceiling C")
    return figure


def missed_by_choices(rows: Rows) -> Figure:
    """MIRROR, figure 7: a panel a speed ratio of the middle model, a line an exit; dashed what the draft model misses by itself."""
    models = sorted({row.get("agreement") for row in rows})
    figure, grid = at_ratios(
        where(rows, agreement=models[len(models) // 2]), xlabel="kappa", ylabel="misses", xscale="log"
    )
    for panel, _, of in grid:
        for exit in in_order([row for row in of if row["choices"]], "exit"):
            points = [(row["choices"], 1 - row["hit_rate"]["value"]) for row in where(of, exit=exit)]
            panel.plot(*zip(*points, strict=True), "o-", label=f"exit {exit}")
        (draft,) = where(of, choices=0)
        panel.axhline(1 - draft["hit_rate"]["value"], color="k", linestyle="--", label="draft model")
        panel.set_ylim(0)
        ticked(panel.xaxis, [row["choices"] for row in rows if row["choices"]])
    legend_of(figure, grid[0][0])
    return figure


def by_window(rows: Rows) -> Figure:
    """MIRROR, figure 3a: above the drafting on the critical path, below tokens per step."""
    ratios = in_order(rows, "ratio")
    figure = Figure(figsize=(WIDTH, 2 * PANEL + 0.5), layout="constrained")
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
    legend_of(figure, grid[0, 0])
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
    axis = {"xlabel": "emulated speed ratio", "ylabel": "throughput over plain decoding", "xscale": "log"}
    figure, grid = panels(labels, **axis)
    for panel, batch in zip(grid, batches, strict=True):
        for variant, (label, style) in BESIDE.items():
            own = where(record["rows"], batch=batch, variant=variant)
            if not own:
                continue
            across = [row["speed"] for row in own]
            if variant in FORECASTS.values():
                middle = [row["over_plain"]["value"] for row in own]
                panel.plot(across, middle, style, marker=".", label=label)
            else:
                aside = 1.01 ** list(BESIDE).index(variant)  # so that no interval lies on another
                bars(panel, [at * aside for at in across], own, "over_plain", fmt=style, label=label)
        panel.axhline(1.0, color="k", linewidth=0.8)
        ticked(panel.xaxis, [row["speed"] for row in record["rows"]])
    legend_of(figure, grid[0])
    yield "ratios", figure


DRAWN: dict[str, Callable[[dict], Iterator[tuple[str, Figure]]]] = {
    "replay": replay, "serve": serve, "engine": engine, "load": load, "roofline": roofline,
    "pipeline": pipeline, "beside": beside,
}  # fmt: skip
