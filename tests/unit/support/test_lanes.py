"""All runs are made, told of and counted, whatever becomes of one of them."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests import lanes
from tests.progress import Progress

CHECKOUT = Path(__file__).parents[3]
GOOD = "import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n"
BAD = "def test_c(): pass\ndef test_d(): assert False\n"
DEAD = "import os\ndef test_e(): os._exit(7)\n"
BROKEN = "import no_such_module\n"
CLOCK = "import pytest\n@pytest.mark.clock\ndef test_it(): pass\n"
SLOW = "import time\ndef test_it():\n    time.sleep({0})\n    open({1!r}, 'a').write('{2} ')\n"
PORT = "from sglang_patches.launch import processes\ndef test_it(): open({0!r}, 'a').write(f'{{processes.free_port()}} ')\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """One file a run; the status, what was printed, and the report."""
    reports = tmp_path / "var"
    monkeypatch.setattr(lanes, "REPORTS", reports)
    monkeypatch.setattr(lanes, "ROOT", tmp_path)
    monkeypatch.setattr(lanes, "PARTS", {part: [] for part in lanes.PARTS})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = clock\n")
    (tmp_path / "tests").mkdir()

    def run(
        *programs: str, part: str = "test", only: tuple[str, ...] = ()
    ) -> tuple[int, list[str], ElementTree.Element]:
        for i, program in enumerate(programs):
            (tmp_path / f"{i}").mkdir(exist_ok=True)
            (tmp_path / f"{i}" / f"test_{i}.py").write_text(program)
        runs = {f"run{i}": [str(tmp_path / f"{i}")] for i in range(len(programs))}
        monkeypatch.setattr(lanes, "RUNS", runs)
        monkeypatch.setattr("sys.argv", ["lanes", part, *only])
        with pytest.raises(SystemExit) as ended:
            lanes.main()
        said = capfd.readouterr().out.splitlines()
        return int(ended.value.code), said, ElementTree.parse(reports / part / "report.xml").getroot()

    return run


def test_all_is_well(run):
    status, said, report = run(GOOD, GOOD)
    assert status == 0
    assert " 2 passed, 2 skipped in " in said[-1] and said[-1].startswith("=")
    assert len(list(report.iter("testcase"))) == 4


def test_one_test_fails(run):
    status, said, _ = run(GOOD, BAD)
    assert status == 1
    assert " 1 failed, 2 passed, 1 skipped in " in said[-1]
    assert [line for line in said if line.startswith("FAILED")] == ["FAILED 1/test_1.py::test_d"]
    assert any(line.startswith("    ") and "assert" in line for line in said)
    assert any(line.startswith("__") and "1/test_1.py::test_d" in line for line in said)
    assert "def test_d(): assert False" in "\n".join(said)


def test_a_run_dies(run):
    status, said, _ = run(DEAD, GOOD)
    assert status == 1
    assert " 1 passed, 1 skipped, 1 errors in " in said[-1]
    assert "FAILED run run0: ended with status 7 and no report" in said


def test_a_lane_goes_on_after_a_run_that_died(run):
    status, said, report = run(DEAD, GOOD, BAD)
    assert status == 1
    assert " 1 failed, 2 passed, 1 skipped, 1 errors in " in said[-1]
    assert len(list(report.iter("testcase"))) == 4


def test_a_file_that_cannot_be_imported_hides_no_other_test(run, tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "test_beside.py").write_text(GOOD)
    status, said, _ = run(BROKEN)
    assert status == 1
    assert " 1 passed, 1 skipped, 1 errors in " in said[-1]


def test_the_rest_s_last_line_counts_make_test_s_too(run):
    assert run(GOOD, BAD)[0] == 1
    status, said, _ = run(GOOD, part="rest")
    assert status == 1, "what failed before has failed"
    assert " 1 passed, 1 skipped in " in said[-3]
    assert " 1 failed, 3 passed, 2 skipped in " in said[-1]


def test_a_part_in_several_sittings_has_one_report(run):
    status, said, report = run(GOOD, BAD, only=("run1",))
    assert status == 1 and " 1 failed, 1 passed in " in said[-1]
    assert said[-2] == "not run yet: clock, run0"
    status, said, report = run(GOOD, BAD, only=("run0",))
    assert status == 1, "what failed before has failed"
    assert "with the last of run1:" in said and " 1 failed, 2 passed, 1 skipped in " in said[-1]
    assert len(list(report.iter("testcase"))) == 4
    status, said, report = run(GOOD, GOOD, only=("run1",))
    assert status == 0 and " 2 passed, 2 skipped in " in said[-1]
    assert len(list(report.iter("testcase"))) == 4


def test_of_what_takes_much_memory_one_run_is_made_at_a_time():
    one, other = sorted(lanes.LARGE)[:2]
    assert lanes.following([one, other, "units"], []) == one
    assert lanes.following([other, "units"], [one]) == "units"
    assert lanes.following([other], [one]) is None
    assert lanes.following([lanes.CLOCK], ["units"]) is None
    assert lanes.following([lanes.CLOCK], []) == lanes.CLOCK


def test_a_run_that_was_interrupted_counts_as_not_made_in_a_later_sitting(run):
    status, said, _ = run(f"{GOOD}def test_z(): raise KeyboardInterrupt\n", GOOD, only=("run0",))
    assert status == 1 and " 2 passed, 1 skipped, 1 errors in " in said[-1]
    _, said, _ = run(GOOD, GOOD, only=("run1",))
    assert said[-2] == "not run yet: clock, run0"


def test_a_whole_part_forgets_earlier_sittings(run):
    run(GOOD, BAD, only=("run1",))
    status, said, _ = run(GOOD)
    assert status == 0 and " 1 passed, 1 skipped in " in said[-1]


def test_a_run_that_is_none_is_named(run, capfd, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lanes", "test", "run9"])
    with pytest.raises(SystemExit):
        lanes.main()
    assert "test has no run run9; it has conformance-servers" in capfd.readouterr().err


def test_what_has_a_limit_in_seconds_runs_alone_after_all_others(run, tmp_path):
    order = tmp_path / "order"
    (tmp_path / "tests" / "test_clock.py").write_text(
        CLOCK.replace("pass", f"open({str(order)!r}, 'a').write('clock ')")
    )
    status, said, _ = run(*(SLOW.format(s, str(order), name) for s, name in ((0, "short"), (3, "long"))))
    assert status == 0
    *others, last = order.read_text().split()
    assert last == "clock" and sorted(others) == ["long", "short"]
    assert " 3 passed in " in said[-1]


def test_a_run_leaves_out_what_has_a_limit_in_seconds(run):
    status, said, _ = run(CLOCK, GOOD)
    assert status == 0
    assert " 1 passed, 1 skipped in " in said[-1]


@pytest.mark.parametrize(
    ("last", "first"),
    [("", "run1"), ("<testsuite name='run2' time='9'/><testsuite name='run1' time='8'/>", "run2")],
)
def test_the_longest_run_is_first_by_the_last_report_or_the_table(run, tmp_path, monkeypatch, last, first):
    monkeypatch.setattr(lanes, "SECONDS", {"test": {"run0": 1.0, "run1": 5.0, "run2": 3.0, "clock": 7.0}})
    (tmp_path / "var" / "test").mkdir(parents=True)
    (tmp_path / "var" / "test" / "report.xml").write_text(f"<testsuites>{last}</testsuites>")
    started, start = [], lanes.Running

    def record(name: str, *words) -> lanes.Running:
        started.append(name)
        return start(name, *words)

    monkeypatch.setattr(lanes, "Running", record)
    run(GOOD, GOOD, GOOD)
    assert started[0] == first and started[2:] == ["run0"]


def test_each_lane_draws_ports_of_its_own(run, tmp_path):
    drawn = tmp_path / "drawn"
    assert run(*[PORT.format(str(drawn))] * 2)[0] == 0
    places = [
        [lane for lane, ports in enumerate(lanes.PORTS) if within(int(port), ports)]
        for port in drawn.read_text().split()
    ]
    assert sorted(places) == [[0], [1]]


def within(port: int, ports: str) -> bool:
    first, last = map(int, ports.split("-"))
    return first <= port <= last


def test_the_share_that_is_done_weighs_each_run_by_its_seconds():
    teller = lanes.Teller({"servers": 60.0, "units": 30.0, "clock": 10.0})
    over = [lanes.Result("units", 0, None)]
    said = teller.line({"servers": Progress(200, 0, 100, [])}, over, 130)
    assert said == "2:10  60%  servers 100/200; 1 of 3 runs are over"
    assert teller.line({"servers": None}, [], 1) == "0:01  0%  servers begins; 0 of 3 runs are over"


def test_progress_is_told_where_no_terminal_is_and_a_failure_at_once(run, monkeypatch):
    monkeypatch.setattr(lanes, "TELL_SECONDS", 0.0)
    told: list[str] = []
    line = lanes.Teller.line
    monkeypatch.setattr(lanes.Teller, "line", lambda *words: told.append(line(*words)) or told[-1])
    slow = "import time\n" + BAD + "def test_last(): time.sleep(2)\n"
    run(slow)
    assert any("run0 2/3; 0 of 1 runs are over, 1 failed" in said for said in told)


def test_on_a_terminal_one_line_is_written_again_and_cut_to_its_width(capfd, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    teller = lanes.Teller({"servers": 60.0, "units": 30.0})
    for _ in range(2):
        teller.tell([], [lanes.Result("units", 0, None)])
    teller.end()
    said = capfd.readouterr().err
    assert said == 2 * (lanes.CLEAR + "0:00  33%  ; 1 of 2") + lanes.CLEAR


def test_what_is_left_to_make_test_all_is_counted(tmp_path):
    """By the suite's own table, on the tests of this folder and of the benchmarks."""
    progress = tmp_path / "progress"
    words = ["tests/unit/benchmarks/test_statistics.py", "tests/unit/support/test_skips.py", "--part", "test"]
    words += ["-p", "tests.progress", f"--progress={progress}", "-q"]
    command = [sys.executable, "-m", "pytest", "--collect-only", *words]
    done = subprocess.run(command, cwd=CHECKOUT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert "test_statistics" not in done.stdout
    total, left = map(int, progress.read_text().split())
    assert total == 3 and left > 3
    assert f", {left} more in make test-all" in lanes.last_line(lanes.Counter(passed=total), 1.0, left)
