"""`python -m benchmarks.report`: the page and the plots of a named run, from the folder its benchmarks wrote their results to.

A folder of results is enough. Of serving the raw records may lie beside them (`*.journal.jsonl`), also of a run that broke off:
the results are then made from those.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import Parser
from benchmarks.report.page import Run, page
from benchmarks.report.records import JOURNAL, dumps
from benchmarks.serve.summary import summarised


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("report", __doc__, records=False)
    parser.add("folder", None, "results of one run (--json of the other commands)", type=Path)
    parser.add("--out", None, "where results and plots are kept; the folder itself if left out", type=Path)
    parser.add("--page", None, "file of the page; README.md of that folder if left out", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    from benchmarks.report import plots

    out = given.out or given.folder
    out.mkdir(parents=True, exist_ok=True)
    texts = {path.stem: path.read_text() for path in given.folder.glob("*.json")}
    for journal in given.folder.glob(f"*{JOURNAL}"):
        texts[journal.name.removesuffix(JOURNAL)] = dumps(summarised(journal))
    for name, text in texts.items():
        (out / f"{name}.json").write_text(text)
        plots.draw(name, json.loads(text), out)
    where = given.page or out / "README.md"
    where.write_text(page(Run.read(out, where)))


if __name__ == "__main__":
    main()
