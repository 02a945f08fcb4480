"""Tables of `python -m benchmarks.beside.loads`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.report.beside import NAMES
from benchmarks.report.markdown import Picture, in_order, interval, no_picture, table


def tables(record: dict, picture: Picture = no_picture) -> list[str]:
    settings = record["manifest"]["settings"]
    return [
        "## Methods under several loads, EMULATED target latency",
        "",
        "Real servers side by side, a core for each target and one for the draft process. The target's latency is EMULATED: each of"
        f" its decode and verify forwards sleeps until it has taken so many times a full draft forward ({settings['rows']} rows)."
        f" Target {settings['model']} in {settings['dtype']}, draft model {settings['draft']}; at most {settings['nodes']} drafted"
        " tokens a step. Throughput over plain decoding. Groups left out because a variant ended one answer before it had begun all:"
        f" {record.get('left_out', 'not counted in this run')}. Last column: SPECSTORE over the fastest other method of the row, which is"
        f" chosen by {record.get('best_by', 'this same measurement')}.",
        "",
        *throughput(record["rows"], record["planner"]),
        *pooled(record["planner"]),
        *exits(record.get("exits", [])),
        *first_tokens(record["first_tokens"]),
        *sessions(record.get("sessions", [])),
    ]


def throughput(rows: Sequence[dict], planner: Sequence[dict]) -> list[str]:
    variants = [name for name in NAMES if name != "plain" and any(row["variant"] == name for row in rows)]
    found = {(row["speed"], row["batch"], row["load"], row["variant"]): row for row in rows}
    over = {(row["speed"], row["batch"], row["load"]): row for row in planner}
    cells = []
    for speed, batch in sorted({(row["speed"], row["batch"]) for row in rows}):
        for load in in_order(rows, "load"):
            base = found.get((speed, batch, load, "plain"))
            if base is None:
                continue
            of = [found[speed, batch, load, name]["over_plain"] for name in variants]
            best = over.get((speed, batch, load))
            said = f"{interval(best['over_best'])} ({NAMES[best['best']]})" if best else ""
            milliseconds = f"{base['milliseconds_per_step']:.0f}"
            values = (f"{one['value']:.2f}" for one in of)
            cells.append([f"{speed:g}", batch, load, base["groups"], milliseconds, *values, said])
    names = (NAMES[name] for name in variants)
    return table(
        (
            "EMULATED speed ratio",
            "batch",
            "load",
            "groups",
            "plain, ms a step",
            *names,
            "SPECSTORE over best other",
        ),
        cells,
    )


def pooled(planner: Sequence[dict]) -> list[str]:
    """Empty where SPECSTORE was not measured."""
    if not planner:
        return []
    cells = [
        [f"{row['speed']:g}", row["batch"], interval(row["over_best"])]
        for row in sorted(planner, key=lambda row: (row["speed"], row["batch"]))
        if row["load"] == "all"
    ]
    return [
        "Over the groups of all loads:",
        "",
        *table(("EMULATED speed ratio", "batch", "SPECSTORE over best other"), cells),
    ]


def exits(rows: Sequence[dict]) -> list[str]:
    """Empty where MIRROR and SAGUARO were not both measured."""
    if not rows:
        return []
    found = {(row["speed"], row["batch"], row["load"]): interval(row["over_saguaro"]) for row in rows}
    loads = in_order(rows, "load")
    cells = [
        [f"{speed:g}", batch, *(found[speed, batch, load] for load in loads)]
        for speed, batch in sorted({(row["speed"], row["batch"]) for row in rows})
    ]
    return ["MIRROR over SAGUARO:", "", *table(("EMULATED speed ratio", "batch", *loads), cells)]


def first_tokens(rows: Sequence[dict]) -> list[str]:
    """Empty without such records."""
    if not rows:
        return []
    cells = [
        [NAMES[row["variant"]], f"{1e3 * row['seconds']:.0f}", interval(row["over_plain"])] for row in rows
    ]
    return [
        "### Time to first token",
        "",
        f"{rows[0]['prompts']} prompts, each alone and for the first time; prefill is not emulated.",
        "",
        *table(("method", "mean, ms", "over plain"), cells),
    ]


def sessions(rows: Sequence[dict]) -> list[str]:
    """Empty without such records."""
    if not rows:
        return []
    cells = [
        [f"{row['speed']:g}", row["batch"], NAMES[row["variant"]], row["rounds"], *_spread(row["accepted"])]
        for row in rows
    ]
    heads = ("EMULATED speed ratio", "batch", "method", "rounds", "without", "fewest", "median", "most")
    return [
        "### Tokens of the draft model, by request",
        "",
        "Accepted by each request of a batch that runs to its end, in all rounds together, and how many requests had none.",
        "",
        *table(heads, cells),
    ]


def _spread(numbers: Sequence[int]) -> tuple[int, int, str, int]:
    return numbers.count(0), min(numbers), f"{median(numbers):g}", max(numbers)
