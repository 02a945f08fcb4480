"""Tables of `python -m benchmarks.pipeline`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.report.markdown import Picture, interval, no_picture, pivot, table

FIGURES = (
    "over_plain",
    "over_synchronous",
    "over_datastore",
    "synchronous_over_plain",
    "hit_rate",
    "tokens_a_step",
    "waiting",
    "hidden",
)
HEADINGS = (
    "over plain", "over synchronous", "over the datastore alone", "synchronous over plain", "hits", "tokens a step", "time waiting", "draft time hidden",
)  # fmt: skip


def tables(record: dict, picture: Picture = no_picture) -> list[str]:
    settings = record["manifest"]["settings"]
    lines = [
        "## Drafting beside the target, simulated",
        "",
        f"A virtual clock, not a measurement: a target forward takes {' '.join(settings['target'])} and a draft forward"
        f" {' '.join(settings['draft'])} (rows:ms), a message {settings['delay_ms']} ms; K = {settings['lookahead']},"
        f" {settings['guesses']} guesses a request, {settings['e_miss']} tokens a step from the datastore after a miss.",
        "",
    ]
    for name, (title, tabulate) in SECTIONS.items():
        if name in record:
            lines += [f"### {title}", "", *tabulate(record[name]), *picture(name, title)]
    return lines


def forecast(rows: Sequence[dict]) -> list[str]:
    by = [name for name in ("acceptance", "batch") if name in rows[0]]
    return table(
        (*by, *HEADINGS),
        ([*(row[name] for name in by), *(f"{row[name]:.2f}" for name in FIGURES)] for row in rows),
    )


def misses(found: dict) -> list[str]:
    counts, cells = pivot(found["rows"], ("after",), "fan_out", lambda row: interval(row["miss_rate"]))
    laws = "; ".join(f"after {kind}: {interval(law)}" for kind, law in found["exponents"].items())
    return [
        *table(("the step before", *(f"F = {count}" for count in counts)), cells),
        f"r of c F^-r {laws}.",
        "",
    ]


def spreads(rows: Sequence[dict]) -> list[str]:
    names, cells = pivot(rows, ("acceptance",) if "acceptance" in rows[0] else (), "fan_out", hits_and_speed)
    return table(
        ("hits, speed over plain" if len(names) < 2 else "acceptance; hits, speed over plain:", *names), cells
    )


def hits_and_speed(row: dict) -> str:
    return f"{row['hit_rate']:.3f}, {row['over_plain']:.2f}"


def fallbacks(found: dict) -> list[str]:
    names, cells = pivot(found["rows"], ("batch",), "fallback", lambda row: f"{row['over_plain']:.2f}")
    critical = ", ".join(f"{value:.2f} for {name}" for name, value in found["critical"].items())
    text = f"Speed over plain. Batch below which Theorem 17 waits instead, b*: {critical}."
    return [*table(("batch", *names), cells), text, ""]


def ratios(found: dict) -> list[str]:
    speeds, cells = pivot(
        found["rows"],
        ("batch",),
        "speed",
        lambda row: f"{row['over_synchronous']:.2f}, {row['over_datastore']:.2f}",
    )
    pays = ", ".join(
        f"batch {batch}: {speed and f'{speed:.1f}'}" for batch, speed in found["break_even"].items()
    )
    headings = ("batch; over synchronous, over the datastore alone, at:", *speeds)
    return [*table(headings, cells), f"It pays beside the datastore from these speed ratios on: {pays}.", ""]


SECTIONS = {
    "forecast": ("Forecast", forecast),
    "misses": ("Misses by guesses (SAGUARO, figure 3)", misses),
    "spreads": ("How guesses are spread (SAGUARO, figure 4)", spreads),
    "fallbacks": ("What answers a miss (SAGUARO, figure 6)", fallbacks),
    "ratios": ("By the target's time over the draft's", ratios),
}
