"""All runs are made, told of and counted, whatever becomes of one of them."""

import xml.etree.ElementTree as ElementTree

import pytest

from tests import lanes

GOOD = "import pytest\ndef test_a(): pass\n@pytest.mark.skip\ndef test_b(): pass\n"
BAD = "def test_c(): pass\ndef test_d(): assert False\n"
DEAD = "import os\ndef test_e(): os._exit(7)\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """One file a run; the status, what was printed, and the report."""
    reports = tmp_path / "var"

    def run(*programs: str) -> tuple[int, list[str], ElementTree.Element]:
        for i, program in enumerate(programs):
            (tmp_path / f"{i}").mkdir()
            (tmp_path / f"{i}" / f"test_{i}.py").write_text(program)
        runs = {f"run{i}": [str(tmp_path / f"{i}")] for i in range(len(programs))}
        monkeypatch.setattr(lanes, "RUNS", runs)
        monkeypatch.setattr(lanes, "REPORTS", reports)
        monkeypatch.setattr(lanes, "ROOT", tmp_path)
        monkeypatch.setattr("sys.argv", ["lanes"])
        with pytest.raises(SystemExit) as ended:
            lanes.main()
        said = capfd.readouterr().out.splitlines()
        return int(ended.value.code), said, ElementTree.parse(reports / "short" / "report.xml").getroot()

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
