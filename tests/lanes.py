"""`python -m tests.lanes [rest|long] [RUN ...]`: the tests of a part, in two lanes side by side; one summary, and reports under var/.

A part that takes hours can be run in several sittings, each with some of its runs: the report has the last of each.

A lane that is free takes the next run, the longest first. Each lane gets one core: two OpenMP processes that spin on two cores slow
each other down tenfold and more. Each lane has its own ports, for servers that bind theirs long after they have chosen it.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_patches.launch.processes import PORTS_VARIABLE, Child
from sglang_patches.methods.registry import METHODS
from tests import progress
from tests.parts import REST, TEST

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "var" / "tests"
IN_PROCESS = [f"tests/conformance/test_{name}.py" for name in ("in_process", "drafts", "toy_methods")]
WITH_SGLANG = [
    f"tests/unit/{name}"
    for name in ("accelerator", "benchmarks", "cpu", "entry", "plugin", "reports", "start", "step")
]


DEMO_MODEL = ["tests/e2e/test_demo_model.py", "tests/e2e/test_compose.py"]


def without(paths: list[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


RUNS = {
    "conformance-servers": ["tests/conformance", *without(IN_PROCESS)],
    "conformance-in-process": IN_PROCESS,
    "e2e": ["tests/e2e", *without(DEMO_MODEL)],
    "e2e-demo-model": DEMO_MODEL[:1],
    "e2e-compose": DEMO_MODEL[1:],
    "units": ["tests/unit", *without(WITH_SGLANG)],
    "units-with-sglang": WITH_SGLANG,
    "integration": ["tests/integration"],
}
CLOCK = "clock"  # the run of tests with strict limits of time: alone, when all others are over
# With --long also the other versions of SGLang, and the suite again for each method with a draft process, with the two extremes of drafts. What tries all drafts
# in any run is left out.
EXTREMES = ("1", "lying")
AGAIN = ["tests/conformance", "-k", "not (test_drafts or pinned or toy or every_width)"]
LONG = {
    f"conformance-{method.name}-{draft}": [*AGAIN, "--method", method.name, "--draft", draft]
    for method in METHODS.values()
    if method.draft_process
    for draft in EXTREMES
}
LONG["versions"] = ["tests/versions"]
# Each of these takes as long as the rest of its folder.
HALF_HOURS = {
    f"e2e-{name}": f"tests/e2e/test_{name.replace('-', '_')}.py" for name in ("draft-kills", "request-cases")
}
LONG |= {name: [path] for name, path in HALF_HOURS.items()}
LONG["e2e"] = [*RUNS["e2e"], *without([*HALF_HOURS.values()])]
# Of what starts servers of the demo model one run at a time: two side by side would need more than 24 GiB.
LARGE = {name for name in RUNS | LONG if name.startswith("e2e")}
# Seconds that the runs took on two cores, for the first time: later the last report says it. Others take LONG_RUN.
SECONDS = {
    TEST: {"conformance-servers": 230, "conformance-in-process": 170, "e2e": 70, "e2e-demo-model": 120}
    | {"e2e-compose": 1, "units": 450, "units-with-sglang": 200, "integration": 230, CLOCK: 40},
    REST: {"conformance-servers": 1300, "conformance-in-process": 600, "e2e": 1500, "e2e-demo-model": 180}
    | {"e2e-compose": 350, "units": 130, "units-with-sglang": 450, "integration": 220, CLOCK: 250},
}
LONG_RUN = 600
PARTS = {TEST: ["--part", TEST], REST: ["--part", REST], "long": ["--long"]}  # words of pytest
# Of each lane. SGLang draws some of its own from 22000 to 29999.
PORTS = ["20000-21999", "30001-32767"]
LANES = len(PORTS)
ONE_CORE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
SLOWEST = 40  # tests that each lane lists
FILES = 25  # that the summary lists
REASON = 12  # last lines of a failure that it shows
TRACEBACK = 80  # last lines of a failure that are printed before it
INTERRUPTED, NO_TESTS = 2, 5  # pytest's status when it was ended, and when it found no test
TELL_SECONDS = 60.0  # between two lines of progress where no terminal shows the last one alone
CLEAR = "\r\x1b[2K"  # a terminal's line


@dataclass(frozen=True)
class Result:
    """Of a run. status: pytest's. report: its JUnit document, None if it was ended before it wrote one. left: tests that it left to the
    rest."""

    name: str
    status: int
    report: ElementTree.Element | None
    left: int = 0

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
    def failures(self) -> Iterator[tuple[str, ElementTree.Element]]:
        """Names of tests, with what became of them."""
        for case in self.cases:
            for child in case:
                if child.tag in {"failure", "error"}:
                    yield f"{_file(case)}::{case.get('name')}", child

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


class Running:
    """A run of pytest in a lane."""

    def __init__(self, name: str, words: list[str], folder: Path, lane: int) -> None:
        self.name, self.lane = name, lane
        self._report, self._progress = folder / f"{name}.xml", folder / f"{name}.progress"
        command = [sys.executable, "-m", "pytest", *words, f"--rootdir={ROOT}", f"--durations={SLOWEST}"]
        command += ["--color=no", f"--junitxml={self._report}", "-o", f"junit_suite_name={name}"]
        command += ["--continue-on-collection-errors", "-p", "tests.progress", f"--progress={self._progress}"]
        environment = ONE_CORE | {"PYTHONUNBUFFERED": "1", PORTS_VARIABLE: PORTS[lane]}
        self.child = Child(name, command, environment, folder / f"{name}.txt", show=False)

    @property
    def progress(self) -> progress.Progress | None:
        return progress.read(self._progress)

    def result(self) -> Result:
        """Once it has ended."""
        done = self.progress
        return Result(self.name, self.child.wait(None), read(self._report), done.left if done else 0)


class Teller:
    """Says how much is done: on a terminal in one line that is written again and again, elsewhere in a line a minute.

    seconds: what each run takes, by guess.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._told = -TELL_SECONDS
        self._failed: set[str] = set()
        self._on_terminal = sys.stderr.isatty()

    def tell(self, running: list[Running], over: list[Result]) -> None:
        now = {run.name: run.progress for run in running}
        for done in filter(None, now.values()):
            for name in done.failed:
                self._say_failed(name)
        passed = time.monotonic() - self._began
        if self._on_terminal:
            line = self.line(now, over, passed)[: shutil.get_terminal_size().columns - 1]
            print(CLEAR + line, end="", file=sys.stderr, flush=True)
        elif passed - self._told >= TELL_SECONDS:
            self._told = passed
            print(self.line(now, over, passed), file=sys.stderr, flush=True)

    def line(self, running: dict[str, progress.Progress | None], over: list[Result], seconds: float) -> str:
        """Such as `4:10  38%  conformance 120/210, units 1800/2500; 2 of 7 runs are over`."""
        shares = {name: done.done / max(done.total, 1) for name, done in running.items() if done}
        shares |= {result.name: 1.0 for result in over}
        share = sum(self._seconds[name] * part for name, part in shares.items()) / sum(self._seconds.values())
        told = ", ".join(
            f"{name} {done.done}/{done.total}" if done else f"{name} begins" for name, done in running.items()
        )
        minutes, rest = divmod(int(seconds), 60)
        failed = f", {len(self._failed)} failed" if self._failed else ""
        return f"{minutes}:{rest:02}  {share:.0%}  {told}; {len(over)} of {len(self._seconds)} runs are over{failed}"

    def end(self) -> None:
        if self._on_terminal:
            print(CLEAR, end="", file=sys.stderr, flush=True)

    def _say_failed(self, name: str) -> None:
        if name not in self._failed:
            self._failed.add(name)
            print((CLEAR if self._on_terminal else "") + f"FAILED {name}", file=sys.stderr, flush=True)


def run(runs: dict[str, list[str]], folder: Path, teller: Teller) -> list[Result]:
    """Runs them all in this order, `LANES` at a time; interrupted, they end as an interrupted pytest does, and no further one is
    started."""
    waiting = dict(runs)
    running: list[Running] = []
    results: list[Result] = []
    while running or waiting:
        try:
            while len(running) < LANES and (name := following(waiting, [busy.name for busy in running])):
                lane = min(set(range(LANES)) - {busy.lane for busy in running})
                running.append(Running(name, waiting.pop(name), folder, lane))
            time.sleep(0.5)
            teller.tell(running, results)
        except KeyboardInterrupt:
            waiting.clear()
            for busy in running:
                if busy.child.status is None:
                    os.kill(busy.child.pid, signal.SIGINT)
        ended = [busy for busy in running if busy.child.status is not None]
        running = [busy for busy in running if busy not in ended]
        results += [busy.result() for busy in ended]
    teller.end()
    return results


def following(waiting: Iterable[str], running: list[str]) -> str | None:
    """The first waiting run that may begin beside those that are running."""
    for name in waiting:
        if name == CLOCK and running:
            return None
        if name not in LARGE or LARGE.isdisjoint(running):
            return name
    return None


def read(path: Path) -> ElementTree.Element | None:
    return ElementTree.parse(path).getroot() if path.exists() else None


def seconds_of(part: str, last: ElementTree.Element | None) -> dict[str, float]:
    """What each run of a part takes. last: its report of the last time."""
    known = SECONDS.get(part, {})
    if last is not None:
        known = known | {
            suite.get("name", ""): float(suite.get("time", 0)) for suite in last.iter("testsuite")
        }
    return {name: known.get(name, LONG_RUN) for name in (*words_of(part), CLOCK)}


def words_of(part: str) -> dict[str, list[str]]:
    """What pytest is told to run, by run."""
    return RUNS | LONG if part == "long" else RUNS


def runs_of(part: str, seconds: dict[str, float]) -> dict[str, list[str]]:
    """The words of pytest for each run in `seconds`, the longest first, and last the one of what has strict limits of time."""
    runs = words_of(part)
    in_order = sorted((name for name in seconds if name != CLOCK), key=lambda name: -seconds[name])
    words = {name: [*runs[name], "-m", f"not {CLOCK}", *PARTS[part]] for name in in_order}
    marked = [
        str(file) for file in (ROOT / "tests").rglob("test_*.py") if f"mark.{CLOCK}" in file.read_text()
    ]
    return words | (
        {CLOCK: [*sorted(marked), "-m", CLOCK, *PARTS[part]]} if marked and CLOCK in seconds else {}
    )


def earlier_results(folder: Path, names: Iterable[str]) -> list[Result]:
    """What earlier sittings reported of these runs."""
    reports = {name: read(folder / f"{name}.xml") for name in names}
    return [Result(name, 0, report) for name, report in reports.items() if report is not None]


def clear(folder: Path, names: Iterable[str]) -> None:
    """Removes what earlier sittings left of these runs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        for kind in ("xml", "txt", "progress"):
            (folder / f"{name}.{kind}").unlink(missing_ok=True)


def counts_of(results: list[Result]) -> Counter:
    """Tests by outcome; a run that died is an error."""
    counts = sum((result.counts for result in results), Counter())
    counts["error"] += sum(result.status not in (0, 1, NO_TESTS) for result in results)
    return counts


def write_report(results: list[Result], seconds: float, path: Path) -> None:
    """One JUnit document of all runs."""
    suites = ElementTree.Element("testsuites", time=f"{seconds:.2f}")
    suites.set("errors", str(counts_of(results)["error"]))
    for result in results:
        if result.report is not None:
            suites.extend(result.report.iter("testsuite"))
    ElementTree.ElementTree(suites).write(path, encoding="utf-8", xml_declaration=True)


def tracebacks(results: list[Result]) -> str:
    lines: list[str] = []
    for name, failure in (failure for result in results for failure in result.failures):
        lines += [f" {name} ".center(100, "_"), *(failure.text or "").splitlines()[-TRACEBACK:]]
    return "\n".join(lines)


def summary(results: list[Result]) -> str:
    """Where the time went, and what failed."""
    lines = ["seconds  file"]
    for result in results:
        lines += [f"{s:7.0f}  {file}" for file, s in result.seconds_by_file.most_common(FILES)]
        for name, failure in result.failures:
            lines.append(f"FAILED {name}")
            lines += [f"    {line}" for line in failure.get("message", "").splitlines()[-REASON:]]
        if result.report is None:
            lines.append(f"FAILED run {result.name}: ended with status {result.status} and no report")
    return "\n".join(lines)


def last_line(counts: Counter, seconds: float, left: int = 0) -> str:
    """As pytest's."""
    words = {"failure": "failed", "passed": "passed", "skipped": "skipped", "error": "errors"}
    told = ", ".join(f"{counts[kind]} {word}" for kind, word in words.items() if counts[kind])
    clock = time.strftime("%H:%M:%S", time.gmtime(seconds))
    more = f", {left} more in make test-all" if left else ""
    return f" {told or 'no tests ran'} in {seconds:.2f}s ({clock}){more} ".center(100, "=")


def last_lines(counted: list[tuple[str, Counter, float]], left: int) -> list[str]:
    """Each sum of the groups up to one. counted: words before the sum, tests by outcome and seconds of each group."""
    lines: list[str] = []
    counts, seconds = Counter(), 0.0
    for words, more, took in counted:
        counts, seconds = counts + more, seconds + took
        lines += [words] * bool(words)
        lines.append(last_line(counts, seconds, left if words == counted[-1][0] else 0))
    return lines


def spent(report: ElementTree.Element | None) -> float:
    """Seconds that a whole report took, in all its sittings."""
    return 0.0 if report is None else float(report.get("time", 0))


def arguments() -> tuple[str, list[str]]:
    """The part, and the names of its runs that were asked for: all if none was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", nargs="?", choices=PARTS, default=TEST, help="what else `make test` leaves out"
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="only these of the part; the report keeps others"
    )
    args = parser.parse_args()
    names = list(seconds_of(args.part, None))
    if unknown := set(args.runs) - set(names):
        parser.error(f"{args.part} has no run {', '.join(sorted(unknown))}; it has {', '.join(names)}")
    return args.part, args.runs or names


def main() -> None:
    part, names = arguments()
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell's background job inherits that SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    folder = REPORTS / part
    last = read(folder / "report.xml")
    known = seconds_of(part, last)
    seconds = {name: known[name] for name in names}
    clear(folder, names)
    earlier = earlier_results(folder, known.keys() - seconds)
    began = time.monotonic()
    runs = runs_of(part, seconds)
    results = run(runs, folder, Teller({name: seconds[name] for name in runs}))
    took = time.monotonic() - began
    for result in results:
        if result.status == INTERRUPTED:  # a later sitting does not take a part of the run for the whole
            (folder / f"{result.name}.xml").unlink(missing_ok=True)
    write_report([*earlier, *results], took + (spent(last) if earlier else 0.0), folder / "report.xml")
    counted = [("", counts_of(results), took)]
    if earlier:
        told = ", ".join(sorted(result.name for result in earlier))
        counted.append((f"with the last of {told}:", counts_of(earlier), spent(last)))
    if part == REST and (before := read(REPORTS / TEST / "report.xml")) is not None:
        others = Result(TEST, 0, before).counts + Counter(error=int(before.get("errors", 0)))
        counted.append(("with those of the last `make test`:", others, spent(before)))
    missing = known.keys() - seconds - {result.name for result in earlier}
    lines = [summary(results), *([f"not run yet: {', '.join(sorted(missing))}"] if missing else [])]
    lines += last_lines(counted, sum(result.left for result in results))
    text = "\n".join(lines)
    (folder / "report.txt").write_text(text + "\n")
    print(f"{tracebacks(results)}\nreports: {folder.relative_to(ROOT)}\n{text}", flush=True)
    sys.exit(any(counts["failure"] or counts["error"] for _, counts, _ in counted))


if __name__ == "__main__":
    main()
