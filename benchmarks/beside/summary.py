"""From the records of a run's loads to its table. What a broken run has measured is summarised too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.beside.servers import VARIANTS
from benchmarks.pipeline.experiments import break_even
from benchmarks.report.beside import FORECASTS
from benchmarks.report.statistics import ratio_of_sums, throughput_ratio

BASELINE, BAR = "plain", "sssd"


def records_of(journal: Path) -> list[dict]:
    """The records of the groups, without those of a group that not every variant has had."""
    rows = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    groups = [row for row in rows if row["kind"] == "group"]
    variants = {row["variant"] for row in groups}
    had: dict[tuple, set] = {}
    for row in groups:
        had.setdefault(_point(row), set()).add(row["variant"])
    return [row for row in groups if had[_point(row)] == variants]


def _point(row: dict) -> tuple:
    return row["speed"], row["batch"], row["group"]


def summarise(records: Sequence[dict]) -> dict:
    """`rows`: one a speed ratio, batch size and variant. `break_even`: by batch size the ratio from which on a method is faster than
    SSSD, as measured and as forecast; None where it is not at the highest."""
    rows = []
    for speed, batch in sorted({(row["speed"], row["batch"]) for row in records}):
        chosen = [row for row in records if (row["speed"], row["batch"]) == (speed, batch)]
        by_variant = {
            name: sorted((row for row in chosen if row["variant"] == name), key=lambda row: row["group"])
            for name in (*VARIANTS, *FORECASTS.values())
        }
        base, bar = by_variant[BASELINE], by_variant[BAR]
        for variant, of in by_variant.items():
            if of:
                rows.append({"speed": speed, "batch": batch, "variant": variant, **figures(of, base, bar)})
    return {"rows": _with_errors(rows), "break_even": list(_break_even(rows))}


def figures(rows: Sequence[dict], base: Sequence[dict], bar: Sequence[dict]) -> dict:
    """Element i of all three is the same group."""

    def over(others: Sequence[dict]) -> object:
        return throughput_ratio(
            *([row[key] for row in side] for side in (rows, others) for key in ("tokens", "seconds"))
        )

    tokens, seconds, steps = (sum(row[key] for row in rows) for key in ("tokens", "seconds", "steps"))
    batch = rows[0]["batch"]
    return {
        "groups": len(rows),
        "over_plain": over(base),
        "over_sssd": over(bar) if bar else None,
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": ratio_of_sums([row["tokens"] for row in rows], [row["steps"] for row in rows]),
        "milliseconds_per_step": 1e3 * seconds * batch / steps,
        **_lookups(rows),
        "by_group": {key: [row[key] for row in rows] for key in ("tokens", "seconds", "steps")},
    }


def _lookups(rows: Sequence[dict]) -> dict:
    """Shares of the look-ups in the speculation cache, for a method with a draft process and its forecast."""
    counts: dict[str, float] = {}
    for row in rows:
        for kind, count in (row.get("kinds") or row.get("draft", {}).get("lookups", {})).items():
            counts[kind] = counts.get(kind, 0.0) + count
    total = sum(counts.values())
    return {f"{kind}_share": counts.get(kind, 0.0) / total for kind in ("hit", "waited")} if total else {}


def _with_errors(rows: Sequence[dict]) -> list[dict]:
    """A row whose variant has a forecast tells what that was over what was measured."""
    found = {(row["speed"], row["batch"], row["variant"]): row for row in rows}
    for row in rows:
        forecast = found.get((row["speed"], row["batch"], FORECASTS.get(row["variant"])))
        if forecast is not None:
            row["forecast_over_measured"] = forecast["over_plain"].value / row["over_plain"].value
    return list(rows)


def _break_even(rows: Sequence[dict]):
    for batch in sorted({row["batch"] for row in rows}):
        found: dict[str, object] = {"batch": batch}
        for variant in (*FORECASTS, *FORECASTS.values()):
            ratios = [
                {"speed": row["speed"], "over": row["over_sssd"]}
                for row in rows
                if (row["variant"], row["batch"]) == (variant, batch) and row["over_sssd"] is not None
            ]
            if len(ratios) > 1:
                found[variant] = break_even(ratios, "over")
        yield found
