"""With CI set, what a machine lacks is a failure, and what a test is not for is a skip still."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
HOOKS = "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
LACKING = """import pytest
@pytest.mark.skipif(True, reason="needs a program")
def test_a_mark(): pass
def test_a_word(): pytest.skip("needs a program")
@pytest.fixture
def program(): pytest.skip("needs a program")
def test_a_fixture(program): pass
"""
MODULE = "import pytest\npytest.importorskip('no_such_module')\ndef test_a(): pass\n"
ALLOWED = """import pytest
@pytest.mark.skip(reason="too long for every change: --long runs it")
def test_a_mark(): pass
def test_a_word(): pytest.skip("too long for every change: --long runs it")
@pytest.mark.xfail
def test_a_fault(): assert False
"""


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """The last line of a run of one file."""

    def outcome(program: str, ci: bool) -> str:
        monkeypatch.delenv("CI", raising=False)
        if ci:
            monkeypatch.setenv("CI", "1")
        (tmp_path / "conftest.py").write_text(HOOKS)
        (tmp_path / "test_it.py").write_text(program)
        command = [sys.executable, "-m", "pytest", "-q", "--color=no", str(tmp_path), f"--rootdir={tmp_path}"]
        done = subprocess.run(
            command, cwd=CHECKOUT, env=os.environ, capture_output=True, text=True, timeout=120
        )
        return done.stdout.splitlines()[-1].partition(" in ")[0]

    return outcome


@pytest.mark.parametrize(
    ("program", "here", "in_ci"),
    [
        (LACKING, "3 skipped", "1 failed, 2 errors"),
        (MODULE, "1 skipped", "1 error"),
        (ALLOWED, "2 skipped, 1 xfailed", "2 skipped, 1 xfailed"),
    ],
)
def test_a_skip_is_a_failure_in_ci_unless_it_is_allowed(outcome, program, here, in_ci):
    assert outcome(program, ci=False) == here
    assert outcome(program, ci=True) == in_ci
