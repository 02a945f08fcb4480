"""Tables of `python -m benchmarks.beside`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report.markdown import Picture, interval, no_picture, table

BESIDE = {
    "saguaro": "SAGUARO",
    "mirror": "MIRROR",
    "double": "DOUBLE",
    "duo": "DUO",
    "specstore": "SPECSTORE",
}
FORECASTS = {name: f"{name}_forecast" for name in BESIDE}  # by what was measured
NAMES = {
    "plain": "plain", "plain_two": "plain, two cores", "sssd": "SSSD", **BESIDE, "standalone": "STANDALONE",
    **{FORECASTS[name]: f"{shown}, forecast" for name, shown in BESIDE.items()},
}  # fmt: skip
AIM = 0.1


def tables(record: dict, picture: Picture = no_picture) -> list[str]:
    settings = record["manifest"]["settings"]
    emulated = bool(settings["speed"])
    title = "Drafting beside the target" + (", EMULATED target latency" if emulated else ", real compute")
    how = (
        "The target's latency is EMULATED: each of its decode and verify forwards sleeps until it has taken so many times a full"
        f" draft forward ({settings['rows']} rows)."
        if emulated
        else "No time is emulated."
    )
    lines = [
        f"## {title}",
        "",
        f"{how} Target {settings['model']}, draft model {settings['draft']}; {settings['nodes']} drafted tokens a step, a core a"
        " process. Throughput over plain decoding, then tokens a step.",
        "",
        *throughput(record["rows"], emulated),
        *forecasts(record["rows"], emulated),
        *picture("ratios", title),
    ]
    return [*lines, *break_even(record["break_even"])] if emulated else lines


def throughput(rows: Sequence[dict], emulated: bool) -> list[str]:
    variants = [name for name in NAMES if name != "plain" and any(row["variant"] == name for row in rows)]
    found = {(row["speed"], row["batch"], row["variant"]): row for row in rows}
    cells = []
    for speed, batch in sorted({(row["speed"], row["batch"]) for row in rows}):
        base = found[speed, batch, "plain"]
        cells.append(
            [
                *([f"{speed:g}"] if emulated else []), batch, base["groups"], f"{base['milliseconds_per_step']:.0f}",
                *(_cell(found.get((speed, batch, name))) for name in variants),
            ]
        )  # fmt: skip
    names = (*(["EMULATED speed ratio"] if emulated else []), "batch", "groups", "plain, ms a step")
    return table((*names, *(NAMES[name] for name in variants)), cells)


def _cell(row: dict | None) -> str:
    return f"{interval(row['over_plain'])} ({row['tokens_per_step']['value']:.2f})" if row else ""


def forecasts(rows: Sequence[dict], emulated: bool) -> list[str]:
    """The rows that have a forecast."""
    found = {(row["speed"], row["batch"], row["variant"]): row for row in rows}
    cells = []
    for row in (row for row in rows if "forecast_over_measured" in row):
        forecast = found[row["speed"], row["batch"], FORECASTS[row["variant"]]]
        error = row["forecast_over_measured"] - 1
        cells.append(
            [
                *([f"{row['speed']:g}"] if emulated else []), row["batch"], NAMES[row["variant"]], interval(row["over_sssd"]),
                f"{forecast['over_sssd']['value']:.2f}", f"{error:+.0%}", "met" if abs(error) <= AIM else "**missed**",
                *(f"{one.get(name, 0.0):.2f}" for one in (row, forecast) for name in ("hit_share", "waited_share")),
            ]
        )  # fmt: skip
    names = (
        *(["EMULATED speed ratio"] if emulated else []),
        "batch",
        "method",
        "over SSSD",
        "forecast",
        "forecast over measured",
        "within 10%",
    )
    return (
        table((*names, "hits", "waited for", "hits, forecast", "waited for, forecast"), cells)
        if cells
        else []
    )


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
            name = NAMES[variant]
            lines += [
                f"{name} is faster than SSSD from these EMULATED speed ratios on: {'; '.join(parts)}.",
                "",
            ]
    return lines
