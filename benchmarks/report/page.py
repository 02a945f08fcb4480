"""A page from the records of one named run.

What is worse than plain decoding or than another method is listed by the same rule as what is better.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.beside import tables as beside
from benchmarks.pipeline import tables as pipelining
from benchmarks.replay import tables as replaying
from benchmarks.report import costs
from benchmarks.report.markdown import in_order
from benchmarks.report.statistics import FEW
from benchmarks.serve import tables as serving

# By the benchmark; those whose record is more than one plot put the pictures into their tables.
COSTS = {
    "engine": costs.engine, "rpc": costs.rpc, "strangers": costs.strangers, "load": costs.load, "upkeep": costs.upkeep,
    "sharing": costs.sharing, "host_time": costs.host_time, "roofline": costs.roofline,
    "rows": costs.rows, "rollouts": costs.rollouts, "predictions": costs.predictions, "agent": costs.agent,
}  # fmt: skip
TABLES = {
    "replay": replaying.tables, "pipeline": pipelining.tables, "beside": beside.tables, "beside.loads": beside.loads,
}  # fmt: skip
RAW = "var"  # where the commands on a page write
QUESTIONS = {  # of the runs that docs/ shows
    "two-cores": "What does it gain on two cores?",
    "two-cores-avx2": "What does it gain without bfloat16 instructions?",
    "kinds-of-text": "How many tokens do drafts bring on other kinds of text?",
    "load": "What does one datastore service carry?",
    "beside-emulated": "What does a draft model gain beside an emulated target?",
    "beside-simulated": "What do the papers' curves look like, simulated?",
}


@dataclass(frozen=True)
class Run:
    """folder: its name is the run's. link: where the page finds it. records: by the JSON files' names."""

    folder: Path
    link: str
    records: dict[str, dict]

    @staticmethod
    def read(folder: Path, page: Path) -> Run:
        """Raises ValueError for a folder without results."""
        records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
        if not records:
            raise ValueError(f"{folder}: holds no results (*.json)")
        return Run(folder, os.path.relpath(folder, page.parent), records)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def of(self, kind: str) -> dict[str, dict]:
        """The records of one benchmark."""
        return {
            name: record for name, record in self.records.items() if record["manifest"]["command"] == kind
        }

    def picture(self, record: str, end: str, title: str) -> list[str]:
        """Nothing if the run has no such plot."""
        file = "-".join(filter(None, (record, end))) + ".png"
        return [f"![{title}]({self.link}/{file})", ""] if (self.folder / file).exists() else []

    def others(self) -> list[str]:
        """Where the pages of the runs beside it are."""
        beside = os.path.normpath(f"{self.link}/..")
        names = [page.parent.name for page in sorted(self.folder.parent.glob("*/README.md"))]
        links = [f"[{name}]({beside}/{name}/README.md)" for name in names if name != self.folder.name]
        return [f"Other runs: {', '.join(links)}.", ""] if links else []


def page(run: Run) -> str:
    lines = [
        f"# {QUESTIONS.get(run.name, 'Benchmarks')}",
        "",
        f"`python -m benchmarks.report` makes this page from the results of the run *{run.name}*, which lie [here]({run.link}) with"
        " their manifests. Brackets are 95% intervals, over answers in replay and over groups of prompts in serving: bootstrap, and"
        f" Student's t below {FEW} groups. The end says how to repeat the run.",
        "",
        *run.others(),
    ]
    rows = serving.rows_of(run.records)
    if rows:
        lines += serving.short_answer(rows)
    for kind, tables in TABLES.items():
        for name, record in run.of(kind).items():
            lines += tables(record, partial(run.picture, name))
        if kind == "replay" and rows:
            lines += served(run, rows)
    for kind, tables in COSTS.items():
        for name, record in run.of(kind).items():
            lines += [*tables(record), *run.picture(name, "", name)]
    return "\n".join([*lines, *how_made(run)]) + "\n"


def tables_of(record: dict) -> list[str]:
    """Lines of Markdown for one record, without plots."""
    return {**COSTS, **TABLES, "serve": serving.tables}[record["manifest"]["command"]](record)


def served(run: Run, rows: serving.Rows) -> list[str]:
    lines = ["## Serving: real servers, real load", ""]
    for name in in_order(rows, "report"):
        of_run = [row for row in rows if row["report"] == name]
        lines += [f"### {name}", "", *serving.by_variant(of_run)]
        for plot in ("cases", "curve", "batches", "steps"):
            lines += run.picture(name, plot, f"{name}, {plot}")
    return lines + serving.of_all(run.records, rows)


def how_made(run: Run) -> list[str]:
    folder = f"{RAW}/{run.name}"
    commands = [
        f"{command(record['manifest'])} --json {folder}/{name}.json" for name, record in run.records.items()
    ]
    lines = [
        "## How to repeat it",
        "",
        "The folder holds results and plots; what each request did (every token, every gap) is not kept. These commands measure it"
        f" again. They leave results in `{folder}/` and, of servers, each group's raw record in `*.journal.jsonl`. The last command"
        " makes plots and page. `benchmarks/data/README.md` says how the files of prompts and answers are made.",
        "",
        *(f"    {line}" for line in [*commands, f"python -m benchmarks.report {folder}"]),
        "",
        "The run was made with:",
        "",
    ]
    for name, record in run.records.items():
        made = record["manifest"]
        packages = ", ".join(f"{package} {version}" for package, version in made["packages"].items())
        files = ", ".join(f"{file} {digest[:12]}" for file, digest in made["prompts"].items()) or "none"
        lines.append(
            f"- **{name}**: {made['cores']} cores of {made['processor']}, Python {made['python']}; {packages}; commit"
            f" {made['commit'][:12]}, lock {made['lock'][:12]}; prompts: {files}."
        )
    return lines


def command(made: dict) -> str:
    """The words that repeat a run."""
    words = ["python -m benchmarks." + made["command"]]
    for name, value in made["settings"].items():
        if value in (None, False, [], "", 0) or name == "json":
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words.append(" ".join([f"--{name.replace('_', '-')}", *map(str, values)]))
    return " ".join(words)
