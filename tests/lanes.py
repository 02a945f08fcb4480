"""`python -m tests.lanes [--long]`: every test, in two lanes side by side; one summary, and reports under var/.

A lane that is free takes the next run. Each lane gets one core: two OpenMP processes that spin on two cores slow each other down
tenfold and more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sglang_patches.drafting.registry import METHODS
from sglang_patches.launch.processes import Child
from tests.conftest import DRAFT, DRAFTS

# The runs of pytest, in the order in which they begin: the longest first. The conformance suite imports SGLang for a CPU, others must
# not. Two halves of the end-to-end tests side by side would need more than 24 GiB.
RUNS = {
    "conformance": ["tests/conformance"],
    "e2e": ["tests/e2e"],
    "units": ["tests/unit"],
    "integration": ["tests/integration"],
}
# With --long also the other versions of SGLang, and the suite again for each method with a draft process, with the drafts that its first run does not have. What
# tries all drafts in any run is left out.
AGAIN = ["tests/conformance", "-k", "not (test_drafts or pinned or toy or every_width)"]
LONG = {
    f"conformance-{method.name}-{draft}": [*AGAIN, "--method", method.name, "--draft", draft]
    for method in METHODS.values()
    if method.draft_process
    for draft in DRAFTS
    if draft != DRAFT
}
LONG["versions"] = ["tests/versions"]
LANES = 2
ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "var" / "tests"
ONE_CORE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SLOWEST = 40  # tests that each lane lists
FILES = 25  # that the summary lists
REASON = 12  # last lines of a failure that it shows
NO_TESTS = 5  # pytest's status when it found none


@dataclass(frozen=True)
class Result:
    """Of a run. status: pytest's. report: its JUnit document, None if it was ended before it wrote one."""

    name: str
    status: int
    report: ElementTree.Element | None

    @property
    def counts(self) -> Counter:
        """Tests by outcome."""
        counts: Counter = Counter()
        for case in self.cases:
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            counts[min(kinds, default="passed")] += 1
        return counts

    @property
    def cases(self) -> list[ElementTree.Element]:
        return [] if self.report is None else list(self.report.iter("testcase"))

    @property
    def seconds_by_file(self) -> Counter:
        seconds: Counter = Counter()
        for case in self.cases:
            seconds[_file(case)] += float(case.get("time", 0))
        return seconds


def _file(case: ElementTree.Element) -> str:
    """From its dotted name, of which a class may be the end."""
    parts = case.get("classname", "").split(".")
    while parts and not (ROOT / Path(*parts)).with_suffix(".py").exists():
        parts.pop()
    return "/".join(parts) + ".py"


def run(runs: dict[str, list[str]], folder: Path, arguments: list[str]) -> list[Result]:
    """Runs them all, `LANES` at a time; interrupted, they end as an interrupted pytest does, and no further one is started."""
    waiting = list(runs.items())
    running: dict[str, Child] = {}
    results: list[Result] = []
    while running or waiting:
        try:
            while waiting and len(running) < LANES:
                name, paths = waiting.pop(0)
                running[name] = start(name, paths, folder, arguments)
            time.sleep(0.5)
        except KeyboardInterrupt:
            waiting.clear()
            for child in running.values():
                if child.status is None:
                    os.kill(child.pid, signal.SIGINT)
        for name, child in list(running.items()):
            if child.status is not None:
                del running[name]
                results.append(Result(name, child.wait(None), read(folder / f"{name}.xml")))
    return results


def start(name: str, paths: list[str], folder: Path, arguments: list[str]) -> Child:
    command = [
        sys.executable,
        "-m",
        "pytest",
        *paths,
        f"--rootdir={ROOT}",
        f"--durations={SLOWEST}",
        "--color=no",
    ]
    command += [f"--junitxml={folder / name}.xml", *arguments]
    return Child(name, command, ONE_CORE | {"PYTHONUNBUFFERED": "1"}, folder / f"{name}.txt")


def read(path: Path) -> ElementTree.Element | None:
    return ElementTree.parse(path).getroot() if path.exists() else None


def write_report(results: list[Result], path: Path) -> None:
    """One JUnit document of all runs."""
    suites = ElementTree.Element("testsuites")
    for result in results:
        if result.report is not None:
            suites.extend(result.report.iter("testsuite"))
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)


def summary(results: list[Result], seconds: float) -> str:
    """Where the time went, what failed, and last a line as pytest's."""
    lines = ["seconds  file"]
    for result in results:
        lines += [f"{s:7.0f}  {file}" for file, s in result.seconds_by_file.most_common(FILES)]
        for case in result.cases:
            for child in case:
                if child.tag in {"failure", "error"}:
                    lines.append(f"FAILED {_file(case)}::{case.get('name')}")
                    lines += [f"    {line}" for line in child.get("message", "").splitlines()[-REASON:]]
        if result.report is None:
            lines.append(f"FAILED run {result.name}: ended with status {result.status} and no report")
    return "\n".join([*lines, last_line(results, seconds)])


def last_line(results: list[Result], seconds: float) -> str:
    counts = sum((result.counts for result in results), Counter())
    counts["error"] += sum(result.status not in (0, 1, NO_TESTS) for result in results)
    words = {"failure": "failed", "passed": "passed", "skipped": "skipped", "error": "errors"}
    told = ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])
    clock = time.strftime("%H:%M:%S", time.gmtime(seconds))
    return f" {told or 'no tests ran'} in {seconds:.2f}s ({clock}) ".center(100, "=")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", action="store_true", help="also what is too long for every change")
    long = parser.parse_args().long
    folder = REPORTS / ("long" if long else "short")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job inherits that SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    results = run(RUNS | LONG if long else RUNS, folder, ["--long"] if long else [])
    text = summary(results, time.monotonic() - began)
    write_report(results, folder / "report.xml")
    (folder / "report.txt").write_text(text + "\n")
    print(f"reports: {folder.relative_to(ROOT)}\n{text}", flush=True)
    sys.exit(any(result.status != 0 for result in results))


if __name__ == "__main__":
    main()
