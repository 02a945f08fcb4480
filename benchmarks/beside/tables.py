"""Tables of `python -m benchmarks.beside` and `benchmarks.beside.loads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.report.markdown import Picture, columns, in_order, interval, no_picture, table

BESIDE = {name.lower(): name for name in ("SAGUARO", "MIRROR", "DOUBLE", "DUO", "ADAPTIVE")}
FORECASTS = {name: f"{name}_forecast" for name in BESIDE}  # by what was measured
NAMES = {
    "plain": "plain", "sssd": "SSSD", **BESIDE, "standalone": "STANDALONE",
    **{FORECASTS[name]: f"{shown}, forecast" for name, shown in BESIDE.items()},
}  # fmt: skip
AIM = 0.1
SPEED = {"emulated speed ratio": "{speed:g}"}
NAME = {"method": lambda row: NAMES[row["variant"]]}


def tables(record: dict, picture: Picture = no_picture) -> list[str]:
    settings, rows = record["manifest"]["settings"], record["rows"]
    emulated = bool(settings["speed"])
    title = "Drafting beside the target" + (", emulated target latency" if emulated else ", real compute")
    how = (
        "The target's latency is emulated: each of its decode and verify forwards sleeps until it has taken so many times a full"
        f" draft forward ({settings['rows']} rows)."
        if emulated
        else "No time is emulated."
    )
    lines = [
        f"## {title}",
        "",
        f"{how} Target {settings['model']}, draft model {settings['draft']}; {settings['nodes']} drafted tokens per step, one"
        " core per process. Throughput over plain decoding, then tokens per step.",
        "",
        *throughput(rows, SPEED if emulated else {}),
        *forecasts(rows, SPEED if emulated else {}),
        *picture("ratios", title),
    ]
    return [*lines, *break_even(record["break_even"])] if emulated else lines


def measured(rows: Sequence[dict]) -> list[str]:
    """The variants but for plain decoding, in one order everywhere."""
    return [name for name in NAMES if name != "plain" and any(row["variant"] == name for row in rows)]


def over_plain(
    rows: Sequence[dict], by: Sequence[str], said: Callable[[dict], str]
) -> tuple[list[dict], dict]:
    """The rows of plain decoding by ratio and batch, and a column for each other variant beside them."""
    found = {(*(row[name] for name in by), row["variant"]): row for row in rows}

    def cell(name: str) -> Callable[[dict], str]:
        def of(base: dict) -> str:
            row = found.get((*(base[key] for key in by), name))
            return said(row) if row else ""

        return of

    base = sorted(
        (row for row in rows if row["variant"] == "plain"), key=lambda row: (row["speed"], row["batch"])
    )
    return base, {NAMES[name]: cell(name) for name in measured(rows)}


PLAIN = {"groups": "{groups}", "plain, ms per step": "{milliseconds_per_step:.0f}"}


def throughput(rows: Sequence[dict], speed: dict) -> list[str]:
    base, others = over_plain(
        rows,
        ("speed", "batch"),
        lambda row: f"{interval(row['over_plain'])} ({row['tokens_per_step']['value']:.2f})",
    )
    return columns(base, {**speed, "batch": "{batch}", **PLAIN, **others})


def forecasts(rows: Sequence[dict], speed: dict) -> list[str]:
    """The rows that have a forecast."""
    found = {(row["speed"], row["batch"], row["variant"]): row for row in rows}
    chosen = [
        row | {"forecast": found[row["speed"], row["batch"], FORECASTS[row["variant"]]]}
        for row in rows
        if "forecast_over_measured" in row
    ]
    cells = {
        **speed, "batch": "{batch}", **NAME, "over SSSD": lambda row: interval(row["over_sssd"]),
        "forecast": "{forecast[over_sssd][value]:.2f}",
        "forecast over measured": lambda row: f"{row['forecast_over_measured'] - 1:+.0%}",
        "within 10%": lambda row: "met" if abs(row["forecast_over_measured"] - 1) <= AIM else "**missed**",
        "hits": lambda row: f"{row.get('hit_share', 0.0):.2f}",
        "waited for": lambda row: f"{row.get('waited_share', 0.0):.2f}",
        "hits, forecast": lambda row: f"{row['forecast'].get('hit_share', 0.0):.2f}",
        "waited for, forecast": lambda row: f"{row['forecast'].get('waited_share', 0.0):.2f}",
    }  # fmt: skip
    return columns(chosen, cells) if chosen else []


def break_even(found: Sequence[dict]) -> list[str]:
    def said(ratio: float | None) -> str:
        return "none of these" if ratio is None else f"{ratio:.1f}"

    lines = []
    for variant, forecast in FORECASTS.items():
        parts = [
            f"batch {row['batch']}: {said(row[variant])} measured, {said(row[forecast])} forecast"
            for row in found
            if variant in row and forecast in row
        ]
        if parts:
            from_here = f"{NAMES[variant]} is faster than SSSD from these emulated speed ratios on"
            lines += [f"{from_here}: {'; '.join(parts)}.", ""]
    return lines


def loads(record: dict, picture: Picture = no_picture) -> list[str]:
    settings = record["manifest"]["settings"]
    return [
        "## Methods under several loads, emulated target latency",
        "",
        "Real servers side by side, a core for each target and one for the draft process. The target's latency is emulated: each of"
        f" its decode and verify forwards sleeps until it has taken so many times a full draft forward ({settings['rows']} rows)."
        f" Target {settings['model']} in {settings['dtype']}, draft model {settings['draft']}; at most {settings['nodes']} drafted"
        " tokens per step. Throughput over plain decoding. Groups left out because a variant ended one answer before it had begun all:"
        f" {record.get('left_out', 'not counted in this run')}. Last column: ADAPTIVE over the fastest other method of the row, which is"
        f" chosen by {record.get('best_by', 'this same measurement')}.",
        "",
        *of_loads(record["rows"], record["planner"]),
        *pooled(record["planner"]),
        *exits(record.get("exits", [])),
        *first_tokens(record["first_tokens"]),
        *sessions(record.get("sessions", [])),
    ]


def of_loads(rows: Sequence[dict], planner: Sequence[dict]) -> list[str]:
    best = {(row["speed"], row["batch"], row["load"]): row for row in planner}

    def over_best(row: dict) -> str:
        found = best.get((row["speed"], row["batch"], row["load"]))
        return f"{interval(found['over_best'])} ({NAMES[found['best']]})" if found else ""

    base, others = over_plain(
        rows, ("speed", "batch", "load"), lambda row: f"{row['over_plain']['value']:.2f}"
    )
    places = in_order(rows, "load")
    base.sort(key=lambda row: (row["speed"], row["batch"], places.index(row["load"])))
    at = {**SPEED, "batch": "{batch}", "load": "{load}"}
    return columns(base, {**at, **PLAIN, **others, "ADAPTIVE over best other": over_best})


def pooled(planner: Sequence[dict]) -> list[str]:
    """The planner over all loads; empty where ADAPTIVE was not measured."""
    chosen = sorted(
        (row for row in planner if row["load"] == "all"), key=lambda row: (row["speed"], row["batch"])
    )
    best = {"ADAPTIVE over best other": lambda row: interval(row["over_best"])}
    lines = columns(chosen, {**SPEED, "batch": "{batch}", **best})
    return ["Over the groups of all loads:", "", *lines] if planner else []


def exits(rows: Sequence[dict]) -> list[str]:
    """MIRROR over SAGUARO; empty where not both were measured."""
    if not rows:
        return []
    found = {(row["speed"], row["batch"], row["load"]): interval(row["over_saguaro"]) for row in rows}
    loads = in_order(rows, "load")
    cells = [
        [f"{speed:g}", batch, *(found[speed, batch, load] for load in loads)]
        for speed, batch in sorted({(row["speed"], row["batch"]) for row in rows})
    ]
    return ["MIRROR over SAGUARO:", "", *table((*SPEED, "batch", *loads), cells)]


def first_tokens(rows: Sequence[dict]) -> list[str]:
    if not rows:
        return []
    text = f"{rows[0]['prompts']} prompts, each alone and for the first time; prefill is not emulated."
    mean = {"mean, ms": lambda row: f"{1e3 * row['seconds']:.0f}"}
    cells = {**NAME, **mean, "over plain": lambda row: interval(row["over_plain"])}
    return ["### Time to first token", "", text, "", *columns(rows, cells)]


def sessions(rows: Sequence[dict]) -> list[str]:
    if not rows:
        return []
    text = "Accepted by each request of a batch that runs to its end, in all rounds together, and how many requests had none."
    cells = {
        **SPEED, "batch": "{batch}", **NAME, "rounds": "{rounds}", "without": lambda row: row["accepted"].count(0),
        "fewest": lambda row: min(row["accepted"]), "median": lambda row: f"{median(row['accepted']):g}",
        "most": lambda row: max(row["accepted"]),
    }  # fmt: skip
    return ["### Tokens of the draft model, by request", "", text, "", *columns(rows, cells)]
