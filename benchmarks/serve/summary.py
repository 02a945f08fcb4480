"""From records (benchmarks.serve.measure) to the results of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from benchmarks.prompts import ALL, SPEC_BENCH
from benchmarks.report.records import journalled
from benchmarks.report.statistics import ratio_of_sums, throughput_ratio
from benchmarks.serve.measure import breakdown
from benchmarks.serve.tables import BASELINE


def difference_rate(rows: Sequence[dict], base: Sequence[dict]) -> float:
    """Share of outputs that differ anywhere from the baseline's."""
    pairs = [
        pair
        for row, of in zip(rows, base, strict=True)
        for pair in zip(of["outputs"], row["outputs"], strict=True)
    ]
    return sum(one != other for one, other in pairs) / len(pairs)


def summarised(path: Path) -> dict:
    """The results of a run, without those of a load that not every server has had."""
    manifest, records = journalled(path)
    size = len(manifest["settings"]["variants"])
    complete = records["group"][: len(records["group"]) // size * size]
    return {"manifest": manifest, "summary": summarise(complete), "bench_serving": records["bench_serving"]}


def summarise(records: Sequence[dict]) -> list[dict]:
    """One row a case, batch, category and variant: of cases with several categories also all of them together, with what was
    predicted of them, and Spec-Bench's six where there are others too."""
    summary = []
    for case, batch in dict.fromkeys((r["case"], r["batch"]) for r in records):
        chosen = [r for r in records if (r["case"], r["batch"]) == (case, batch)]
        for category, members in _groupings(dict.fromkeys(r["category"] for r in chosen)).items():
            of_category = [r for r in chosen if r["category"] in members]
            base = _of_variant(of_category, BASELINE)
            for variant in dict.fromkeys(r["variant"] for r in chosen):
                labels = {"case": case, "batch": batch, "category": category, "variant": variant}
                rows = _of_variant(of_category, variant)
                row = labels | figures(rows, base)
                if category == ALL:
                    row["predicted_tokens_per_second"] = expected(rows)
                if len(members) == 1:
                    row["by_group"] = by_group(rows)
                summary.append(row)
    return summary


def expected(rows: Sequence[dict]) -> float | None:
    """Tokens per second, as forecast; None where not every group was."""
    if any(row["expected"] is None for row in rows):
        return None
    tokens, seconds = zip(*(row["expected"] for row in rows), strict=True)
    return sum(tokens) / sum(seconds)


def by_group(rows: Sequence[dict]) -> dict[str, list]:
    """What the intervals and predictions are made of."""
    forecasts = [row["expected"] or (None, None) for row in rows]
    measured = {key: [row[key] for row in rows] for key in ("tokens", "seconds", "decoded", "steps")}
    return measured | {
        "expected_tokens": [tokens for tokens, _ in forecasts],
        "expected_seconds": [seconds for _, seconds in forecasts],
    }


def _groupings(categories: Collection[str]) -> dict[str, Collection[str]]:
    """What each row of the summary is about: its name, and the categories in it."""
    if len(categories) == 1:
        return {ALL: categories}
    found: dict[str, Collection[str]] = {category: [category] for category in categories}
    if set(SPEC_BENCH) < set(categories):
        found["Spec-Bench"] = SPEC_BENCH
    return found | {ALL: categories}


def _of_variant(records: Sequence[dict], variant: str) -> list[dict]:
    rows = [r for r in records if r["variant"] == variant]
    return sorted(rows, key=lambda r: (r["category"], r["group"]))


def figures(rows: list[dict], base: list[dict]) -> dict:
    """Of one variant against the baseline; element i of both is the same group."""
    columns = [[r[key] for r in side] for side in (rows, base) for key in ("tokens", "seconds")]
    per_second = sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows)
    gaps = [gap for r in rows for gap in r["gaps"]] or [0.0]
    per_step = ratio_of_sums([r["decoded"] for r in rows], [r["steps"] for r in rows])
    return {
        "groups": len(rows),
        "throughput_ratio": throughput_ratio(*columns),
        "tokens_per_step": per_step,
        "milliseconds_per_step": 1e3 * rows[0]["batch"] * per_step.value / per_second,
        "tokens_per_second": per_second,
        "ttft_p50": float(np.median([second for r in rows for second in r["ttft_seconds"]])),
        "gap_mean": float(np.mean(gaps)),
        "gap_p50": float(np.percentile(gaps, 50)),
        "gap_p99": float(np.percentile(gaps, 99)),
        "outputs_differing": difference_rate(rows, base),
        "breakdown": breakdown(rows),
    }
