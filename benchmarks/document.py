"""`python -m benchmarks.document`: docs/benchmarks.md from the committed results of one named run.

The folder holds the JSON files of benchmarks.replay, benchmarks.serve and benchmarks.roofline, with the plots beside them. What
is worse than plain decoding or than another method is listed by the same rule as what is better.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prompts import ALL
from benchmarks.replay.methods import OURS, OWN
from benchmarks.statistics import FEW, Interval

DOCS = Path(__file__).resolve().parents[1] / "docs"
BUDGETS = (8, 16, 32)  # of the comparison by category
PRIMARY = {"sssd": "a prior of recorded answers", "sssd_cold": "an empty datastore"}
FASTER, SAME, SLOWER = "Faster", "No difference that this run could see", "Slower"
SAMPLED = ("sampled", "unrelated")  # cases at a temperature above 0
LOSSY = (
    "\\* Not a comparison: on a CPU SGLang's NGRAM takes the likeliest token at any temperature (`_verify_uses_greedy`), so it wrote another"
    " text."
)
NEAR = 0.1  # a prediction that holds
UNKNOWN = "Not judged, for there is only one group"


@dataclass(frozen=True)
class Run:
    """folder: its name is the run's. link: where the page finds it. reports: by the JSON files' names."""

    folder: Path
    link: str
    reports: dict[str, dict]

    @staticmethod
    def read(folder: Path, page: Path) -> Run:
        """Raises ValueError for a folder without results."""
        reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        if not reports:
            raise ValueError(f"{folder}: holds no results (*.json)")
        return Run(folder, os.path.relpath(folder, page.parent), reports)

    def picture(self, name: str, title: str) -> list[str]:
        """Nothing if the run has no such plot."""
        drawn = (self.folder / f"{name}.png").exists()
        return [f"![{title}]({self.link}/{name}.png)", ""] if drawn else []

    def others(self) -> list[str]:
        """Where the pages of the runs beside it are."""
        beside = os.path.normpath(f"{self.link}/..")
        names = [page.parent.name for page in sorted(self.folder.parent.glob("*/README.md"))]
        links = [f"[{name}]({beside}/{name}/README.md)" for name in names if name != self.folder.name]
        return [f"Other runs: {', '.join(links)}.", ""] if links else []

    def serving(self) -> list[dict]:
        """The rows of all serving reports, the one it came from as `report`."""
        return [
            {"report": name, **row}
            for name, report in self.reports.items()
            if "summary" in report
            for row in report["summary"]
        ]


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def interval(value: dict) -> str:
    return str(Interval(**value))


def in_order(rows: Iterable[dict], key: str) -> list:
    return list(dict.fromkeys(row[key] for row in rows))


def document(run: Run) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"Made by `python -m benchmarks.document` from the results of the run *{run.folder.resolve().name}*, which lie"
        f" [here]({run.link}) with their manifests; not written by hand. Brackets are 95% intervals, over"
        f" answers in replay and over groups of prompts in serving: bootstrap, and Student's t below {FEW} groups. How to repeat it stands at the end.",
        "",
        *run.others(),
    ]
    serving = run.serving()
    if serving:
        lines += short_answer(serving)
    if "replay" in run.reports:
        lines += replay(run)
    if serving:
        lines += serving_tables(run, serving)
    if "roofline" in run.reports:
        lines += roofline(run)
    return "\n".join([*lines, *how_made(run)]) + "\n"


def short_answer(serving: Sequence[dict]) -> list[str]:
    """Wins and losses of SSSD against plain decoding, by one rule."""
    lines = ["## Does it help, and when not?", ""]
    for arm, what in PRIMARY.items():
        own = [row for row in serving if row["arm"] == arm]
        if own:
            lines += [f"Throughput of `{arm}` ({what}) over plain decoding:", "", *verdicts(own), ""]
    return lines


def verdicts(rows: Sequence[dict]) -> list[str]:
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


def replay(run: Run) -> list[str]:
    results = run.reports["replay"]["results"]
    lines = ["## Replay: tokens a step without a model in the loop", ""]
    sections = (
        ("methods", "With a prior", compared),
        ("cold", "Without a prior", compared),
        ("size", "A growing prior (SSSD, figure 5a; Double, table 3)", grown),
        ("language", "Another language (SSSD, figure 5b)", grown),
        ("entries", "Whose answers (SSSD, figure 5c)", grown),
    )
    for name, title, tabulate in sections:
        if results.get(name):
            lines += [f"### {title}", "", *tabulate(results[name]), *run.picture(f"replay-{name}", title)]
    if "footprint" in results:
        rows = (
            (row["method"], row["tokens"], f"{row['build_seconds']:.1f}", f"{row['bytes_per_token']:.1f}")
            for row in results["footprint"]
        )
        headings = ("method", "tokens", "seconds to build", "bytes a token, memory that stays")
        lines += ["### What an index costs", "", *table(headings, rows)]
    return lines


def compared(records: Sequence[dict]) -> list[str]:
    """Every method over node budgets, then ours against the strongest other by category."""
    budgets = sorted({record["nodes"] for record in records})
    rows = []
    for method in in_order(records, "method"):
        own = {r["nodes"]: r for r in records if r["method"] == method and r["category"] == ALL}
        middle = own[16] if 16 in own else own[budgets[-1]]
        values = (interval(own[nodes]["tokens_per_step"]) for nodes in budgets)
        name = f"**{method}**" if method == OURS else method
        rows.append((name, *values, f"{middle['p50_us']:.0f}", f"{middle['p99_us']:.0f}"))
    headings = (
        "tokens a step, all answers",
        *(f"{nodes} nodes" for nodes in budgets),
        "µs a draft, p50",
        "p99",
    )
    return [*table(headings, rows), *against_others(records)]


def against_others(records: Sequence[dict]) -> list[str]:
    others = [record for record in records if record["method"] not in OWN]
    budgets = [nodes for nodes in BUDGETS if any(record["nodes"] == nodes for record in others)]
    rows, losses = [], []
    for category in in_order(records, "category"):
        cells = []
        for nodes in budgets:
            here = [r for r in others if (r["category"], r["nodes"]) == (category, nodes)]
            best = min(here, key=lambda r: r["ours_over_it"]["value"])
            cells.append(f"{interval(best['ours_over_it'])} {best['method']}")
            losses += [(category, nodes, best)] if best["ours_over_it"]["value"] < 1 else []
        rows.append((category, *cells))
    headings = ("ours over the strongest other", *(f"{nodes} nodes" for nodes in budgets))
    lines = table(headings, rows)
    if not losses:
        return [*lines, "Ours is behind nowhere.", ""]
    shown = "; ".join(
        f"{category}, {nodes} nodes: {interval(best['ours_over_it'])} of {best['method']}"
        for category, nodes, best in losses
    )
    return [*lines, f"Ours is behind in: {shown}.", ""]


def grown(records: Sequence[dict]) -> list[str]:
    """Categories over what the prior holds."""
    labels = [key for key in ("beside", "answers") if key in records[0]]
    categories = in_order(records, "category")
    groups: dict[tuple, dict] = {}
    for r in records:
        key = (*(r[label] for label in labels), r["documents"], r["tokens"], f"{r['bytes'] / 1e3:.0f}")
        groups.setdefault(key, {})[r["category"]] = f"{r['tokens_per_step']['value']:.2f}"
    rows = ((*key, *(cells[category] for category in categories)) for key, cells in groups.items())
    return table((*labels, "documents", "tokens", "KB", *categories), rows)


def serving_tables(run: Run, serving: Sequence[dict]) -> list[str]:
    lines = ["## Serving: real servers, real load", ""]
    for name in in_order(serving, "report"):
        rows = [row for row in serving if row["report"] == name]
        arms = [arm for arm in in_order(rows, "arm") if arm != "plain"]
        lines += [f"### {name}", "", f"`{command(run.reports[name])}`", ""]
        lines += [
            "Throughput over plain decoding, and tokens a step in parentheses.",
            "",
            *by_arm(rows, arms),
        ]
        for plot in ("curve", "cases", "predicted"):
            lines += run.picture(f"{name}-{plot}", f"{name}, {plot}")
    return [*lines, *latencies(serving), *by_bench_serving(run), *shares(serving), *predicted(run, serving)]


def by_arm(rows: Sequence[dict], arms: Sequence[str]) -> list[str]:
    found = []
    for case, batch, category in dict.fromkeys((r["case"], r["batch"], r["category"]) for r in rows):
        here = {
            r["arm"]: r for r in rows if (r["case"], r["batch"], r["category"]) == (case, batch, category)
        }
        cells = (
            f"{interval(here[arm]['throughput_ratio'])} ({here[arm]['tokens_per_step']['value']:.2f})"
            + ("*" if is_lossy(here[arm]) else "")
            for arm in arms
        )
        plain = f"{here['plain']['tokens_per_second']:.0f}" if "plain" in here else ""
        found.append((place(here[arms[0]]), here[arms[0]]["groups"], plain, *cells))
    lines = table(("case", "groups", "plain, tokens/s", *arms), found)
    return [*lines, LOSSY, ""] if any(map(is_lossy, rows)) else lines


def is_lossy(row: dict) -> bool:
    return row["arm"].startswith("ngram") and row["case"] in SAMPLED


def latencies(serving: Sequence[dict]) -> list[str]:
    rows = [row for row in serving if row["case"] == "streamed"]
    if not rows:
        return []
    cells = (
        (
            row["batch"],
            row["arm"],
            *(f"{1e3 * row[key]:.0f}" for key in ("ttft_p50", "gap_p50", "gap_p99", "gap_mean")),
        )
        for row in rows
    )
    headings = ("batch", "arm", "first token, p50 ms", "between tokens: p50 ms", "p99 ms", "mean ms")
    return ["### Latency, every token streamed", "", *table(headings, cells)]


def by_bench_serving(run: Run) -> list[str]:
    rows = [row for report in run.reports.values() for row in report.get("bench_serving", ())]
    if not rows:
        return []
    plain = {row["batch"]: row["output_throughput"] for row in rows if row["arm"] == "plain"}
    cells = (
        (
            row["batch"], row["arm"], f"{row['output_throughput']:.1f}",
            f"{row['output_throughput'] / plain[row['batch']]:.2f}",
            *(f"{row[key]:.0f}" for key in ("median_ttft_ms", "median_itl_ms", "p99_itl_ms")),
        )
        for row in rows
    )  # fmt: skip
    headings = (
        "batch",
        "arm",
        "tokens/s",
        "x plain",
        "first token, median ms",
        "between tokens: median ms",
        "p99 ms",
    )
    text = "Prefills are within its timed part, and it ends with the slowest request. One run each, so without an interval."
    return ["### The same servers under `sglang.bench_serving`", "", text, "", *table(headings, cells)]


def shares(serving: Sequence[dict]) -> list[str]:
    rows = [
        row
        for row in serving
        if row["breakdown"] and row["category"] == ALL and row["case"] in ("mixed", "tasks")
    ]
    if not rows:
        return []
    parts = list(rows[0]["breakdown"])
    cells = (
        (row["case"], row["batch"], row["arm"], *(f"{row['breakdown'][part]:.1%}" for part in parts))
        for row in rows
    )
    return ["### Where the time goes (Double, table 10)", "", *table(("case", "batch", "arm", *parts), cells)]


def predicted(run: Run, serving: Sequence[dict]) -> list[str]:
    rows = [row for row in serving if row.get("predicted_tokens_per_second")]
    if not rows:
        return []
    plain = {_point(row): _error(row) for row in rows if row["arm"] == "plain"}
    errors = [_error(row) for row in rows]
    of_ratios = [
        None if row["arm"] == "plain" else (1 + error) / (1 + plain[_point(row)]) - 1
        for row, error in zip(rows, errors, strict=True)
    ]
    ratios = [error for error in of_ratios if error is not None]
    by_pilots = [name for name in in_order(rows, "report") if not _forecast(run.reports[name])]
    but = f" (in {', '.join(by_pilots)} of pilot loads alone)" if by_pilots else ""
    text = (
        f"Each group is predicted before it is run, with the step times of the loads before it{but}: {_near(errors)} of {len(errors)} are within 10% of what was measured. In the ratio to"
        f" plain decoding the pace of a shared machine cancels: {_near(ratios)} of {len(ratios)} are within 10%."
    )
    cells = (
        (
            place(row), row["arm"], f"{row['predicted_tokens_per_second']:.1f}", f"{row['tokens_per_second']:.1f}",
            f"{error:+.0%}", "" if of_ratio is None else f"{of_ratio:+.0%}",
        )
        for row, error, of_ratio in zip(rows, errors, of_ratios, strict=True)
    )  # fmt: skip
    headings = ("case", "arm", "predicted tokens/s", "measured", "error", "error of the ratio to plain")
    return ["### Predicted and measured", "", text, "", *table(headings, cells)]


def _point(row: dict) -> tuple:
    return row["report"], row["case"], row["batch"]


def _error(row: dict) -> float:
    return row["predicted_tokens_per_second"] / row["tokens_per_second"] - 1


def _near(errors: Sequence[float]) -> int:
    return sum(abs(error) <= NEAR for error in errors)


def _forecast(report: dict) -> bool:
    """Whether each group was, from all loads before it; reports of the first runs were predicted as a whole."""
    return any(record.get("expected") for record in report.get("records", ()))


def roofline(run: Run) -> list[str]:
    report = run.reports["roofline"]
    lengths = list(report["results"][0]["cost"])
    rows = (
        (
            row["batch"],
            f"{row['plain_ms']:.2f}",
            row["speculation_length"],
            *(f"{cost:.2f}" for cost in row["cost"].values()),
        )
        for row in report["results"]
    )
    settings = report["manifest"]["settings"]
    text = (
        f"A calculation, not a measurement (SSSD, appendix B): {settings['teraflops']} TFLOP/s, {settings['bandwidth']} TB/s,"
        f" context {settings['context']}. The ridge point is {report['ridge']:.0f} FLOPs a byte. Step time over plain decoding by"
        " rows of each request:"
    )
    headings = ("batch", "plain step, ms", "rows by the rule", *lengths)
    return ["## What verification costs on a GPU", "", text, "", *table(headings, rows)]


def command(report: dict) -> str:
    """The words that repeat a report, files by their names."""
    words = ["python -m benchmarks." + report["manifest"]["command"]]
    for name, value in report["manifest"]["settings"].items():
        if value in (None, False, [], "", 0) or name == "json":
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words.append(" ".join([f"--{name.replace('_', '-')}", *(os.path.basename(str(v)) for v in values)]))
    return " ".join(words)


def how_made(run: Run) -> list[str]:
    lines = ["## How this was made", "", "Recorded files are made as `benchmarks/data/README.md` says.", ""]
    for name, report in run.reports.items():
        made = report["manifest"]
        packages = ", ".join(f"{package} {version}" for package, version in made["packages"].items())
        prompts = ", ".join(f"{file} {digest[:12]}" for file, digest in made["prompts"].items()) or "none"
        lines.append(
            f"- **{name}**: `{command(report)}`; {made['cores']} cores of {made['processor']}, Python {made['python']};"
            f" {packages}; commit {made['commit'][:12]}, lock {made['lock'][:12]}; prompts: {prompts}."
        )
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.document", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="the named run: docs/benchmarks/NAME")
    parser.add_argument("--out", type=Path, default=DOCS / "benchmarks.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    given.out.write_text(document(Run.read(given.folder, given.out)))


if __name__ == "__main__":
    main()
