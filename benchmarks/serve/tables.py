"""Tables of `python -m benchmarks.serve`: of one run in the terminal, of several on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.prompts import ALL
from benchmarks.report.markdown import columns, in_order, interval, pivot, table

BASELINE = "plain"
PRIMARY = {"sssd": "a corpus of recorded answers", "sssd_cold": "an empty datastore"}
FASTER, SAME, SLOWER = "Faster", "No difference that this run could see", "Slower"
UNKNOWN = "Not judged, for there is only one group"
SAMPLED = ("sampled", "unrelated")  # cases at a temperature above 0
LOSSY = (
    "\\* Not a comparison: on a CPU SGLang's NGRAM takes the likeliest token at any temperature (`_verify_uses_greedy`), so it wrote"
    " another text."
)
NEAR = 0.1  # error of a prediction that holds

Rows = Sequence[dict]


def rows_of(records: dict[str, dict]) -> list[dict]:
    """The rows of serving records by name, the one it came from as `report`."""
    return [
        {"report": name, **row}
        for name, record in records.items()
        if record["manifest"]["command"] == "serve"
        for row in record["summary"]
    ]


def tables(record: dict) -> list[str]:
    """Of one run."""
    records = {"this run": record}
    rows = rows_of(records)
    return [*by_variant(rows), *of_all(records, rows)]


def of_all(records: dict[str, dict], rows: Rows) -> list[str]:
    """What is shown of all runs together."""
    return [*waits(rows), *by_bench_serving(records), *shares(rows), *predicted(rows)]


def short_answer(rows: Rows) -> list[str]:
    """Wins and losses of SSSD against plain decoding, by one rule."""
    lines = ["## Does it help, and when not?", ""]
    for variant, what in PRIMARY.items():
        own = [row for row in rows if row["variant"] == variant]
        if own:
            lines += [f"Throughput of `{variant}` ({what}) over plain decoding:", "", *verdicts(own), ""]
    return lines


def verdicts(rows: Rows) -> list[str]:
    sorts: dict[str, list[dict]] = {FASTER: [], SAME: [], SLOWER: [], UNKNOWN: []}
    for row in sorted(rows, key=lambda row: -row["throughput_ratio"]["value"]):
        sorts[verdict(**row["throughput_ratio"])].append(row)
    return [
        f"- **{name}** ({len(of_sort)} of {len(rows)}): "
        + ("; ".join(f"{place(row)} {interval(row['throughput_ratio'])}" for row in of_sort) or "none")
        for name, of_sort in sorts.items()
        if of_sort or name != UNKNOWN
    ]


def verdict(value: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return UNKNOWN
    return FASTER if low > 1 else SLOWER if high < 1 else SAME


def place(row: dict) -> str:
    name = row["case"] if row["category"] in (ALL, row["case"]) else row["category"]
    return f"{name} at batch {row['batch']}"


def by_variant(rows: Rows) -> list[str]:
    """Cases by what was served."""
    by = ("case", "batch", "category")
    first = {tuple(row[name] for name in by): row for row in reversed(rows)}
    plain = {_point(row): f"{row['tokens_per_second']:.0f}" for row in rows if row["variant"] == BASELINE}
    variants, found = pivot(
        [row for row in rows if row["variant"] != BASELINE], by, "variant", ratio_and_tokens
    )
    cells = [
        (place(first[key]), first[key]["groups"], plain.get(_point(first[key]), ""), *values)
        for key, values in ((row[: len(by)], row[len(by) :]) for row in found)
    ]
    text = "Throughput over plain decoding, and tokens per step in parentheses."
    lines = [text, "", *table(("case", "groups", "plain, tokens/s", *variants), cells)]
    return [*lines, LOSSY, ""] if any(map(is_lossy, rows)) else lines


def ratio_and_tokens(row: dict) -> str:
    mark = "*" if is_lossy(row) else ""
    return f"{interval(row['throughput_ratio'])} ({row['tokens_per_step']['value']:.2f}){mark}"


def is_lossy(row: dict) -> bool:
    return row["variant"].startswith("ngram") and row["case"] in SAMPLED


def waits(rows: Rows) -> list[str]:
    """What a user sees beside throughput."""

    def ms(key: str) -> Callable[[dict], str]:
        return lambda row: f"{1e3 * row[key]:.0f}"

    cells = {
        "case": place, "variant": "{variant}", "ms per step": "{milliseconds_per_step:.0f}",
        "first token, p50 ms": ms("ttft_p50"), "between tokens: p50 ms": ms("gap_p50"), "p99 ms": ms("gap_p99"),
        "mean ms": ms("gap_mean"), "outputs that differ from plain's":
            lambda row: "" if row["case"] in SAMPLED else f"{row['outputs_differing']:.0%}",
    }  # fmt: skip
    text = "Servers send eight tokens at a time, but in the case streamed each token as it comes."
    chosen = [row for row in rows if row["category"] == ALL]
    return ["### Times of a step and of a user", "", text, "", *columns(chosen, cells)]


def by_bench_serving(records: dict[str, dict]) -> list[str]:
    rows = [row for record in records.values() for row in record.get("bench_serving", ())]
    if not rows:
        return []
    plain = {row["batch"]: row["output_throughput"] for row in rows if row["variant"] == BASELINE}
    cells = {
        "batch": "{batch}", "variant": "{variant}", "tokens/s": "{output_throughput:.1f}",
        "x plain": lambda row: f"{row['output_throughput'] / plain[row['batch']]:.2f}",
        "first token, median ms": "{median_ttft_ms:.0f}", "between tokens: median ms": "{median_itl_ms:.0f}",
        "p99 ms": "{p99_itl_ms:.0f}",
    }  # fmt: skip
    text = "Prefills are within its timed part, and it ends with the slowest request. One run each, so without an interval."
    return ["### The same servers under `sglang.bench_serving`", "", text, "", *columns(rows, cells)]


def divisible(rows: Rows) -> list[dict]:
    """The cases whose steps are shown by their parts."""
    return [row for row in rows if row["category"] == ALL and row["case"] in ("mixed", "tasks")]


def shares(rows: Rows) -> list[str]:
    chosen = [row for row in divisible(rows) if row["breakdown"]]
    if not chosen:
        return []
    cells = {name: f"{{{name}}}" for name in ("case", "batch", "variant")}
    cells |= {part: f"{{breakdown[{part}]:.1%}}" for part in chosen[0]["breakdown"]}
    return ["### Where the time goes (Double, table 10)", "", *columns(chosen, cells)]


def predicted(rows: Rows) -> list[str]:
    chosen = [row for row in rows if row.get("predicted_tokens_per_second")]
    if not chosen:
        return []
    plain = {_point(row): _error(row) for row in chosen if row["variant"] == BASELINE}
    chosen = [row | {"error": _error(row)} for row in chosen]
    for row in chosen:
        row["of_ratio"] = (
            None if row["variant"] == BASELINE else (1 + row["error"]) / (1 + plain[_point(row)]) - 1
        )
    errors = [row["error"] for row in chosen]
    ratios = [row["of_ratio"] for row in chosen if row["of_ratio"] is not None]
    reports = {name: [row for row in rows if row["report"] == name] for name in in_order(chosen, "report")}
    by_pilots = [name for name, of_report in reports.items() if not _was_forecast(of_report)]
    but = f" (in {', '.join(by_pilots)} of pilot loads alone)" if by_pilots else ""
    text = (
        f"Each group is predicted before it is run, with the step times of the loads before it{but}: {_near(errors)} of"
        f" {len(errors)} are within 10% of what was measured. In the ratio to plain decoding the pace of a shared machine cancels:"
        f" {_near(ratios)} of {len(ratios)} are within 10%."
    )
    cells = {
        "case": place, "variant": "{variant}", "predicted tokens/s": "{predicted_tokens_per_second:.1f}",
        "measured": "{tokens_per_second:.1f}", "error": "{error:+.0%}", "error of the ratio to plain":
            lambda row: "" if row["of_ratio"] is None else f"{row['of_ratio']:+.0%}",
    }  # fmt: skip
    return ["### Predicted and measured", "", text, "", *columns(chosen, cells)]


def _point(row: dict) -> tuple:
    return row["report"], row["case"], row["batch"], row["category"]


def _error(row: dict) -> float:
    return row["predicted_tokens_per_second"] / row["tokens_per_second"] - 1


def _near(errors: Sequence[float]) -> int:
    return sum(abs(error) <= NEAR for error in errors)


def _was_forecast(rows: Rows) -> bool:
    """Whether each group of a run was predicted; the first runs were as a whole."""
    return any(any(row["by_group"]["expected_tokens"]) for row in rows if "by_group" in row)
