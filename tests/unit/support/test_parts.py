"""Each test is in one part, the page shows which, and one process can collect them all."""

import os
import subprocess
import sys
from pathlib import Path

from sglang_patches.methods.registry import ALGORITHMS
from tests import parts

TESTS = Path(__file__).parents[2]
INTERPRETED = "interpreted"  # a folder that a process of its own runs


def test_the_page_has_the_table():
    assert parts.table() in (TESTS.parent / "docs" / "tests.md").read_text()


def test_each_row_names_what_is_there():
    """Else what was renamed would silently change its part."""
    conftest = (TESTS / "conformance" / "conftest.py").read_text()
    for row in parts.ROWS:
        path = TESTS / row.path
        assert path.exists()
        for word in row.words:
            assert word in ALGORITHMS or f'"{word}": Setup(' in conftest or f"def {word}(" in path.read_text()


def test_a_method_of_make_test_has_one_server_there():
    for method, setup in parts.SETUPS.items():
        name = "tests/conformance/test_features.py::test_penalties[{}-{}-frequency]"
        assert parts.part_of(name.format(method, setup)) == parts.TEST
        assert parts.part_of(name.format(method, parts.OTHER_SETUPS[method])) == parts.REST
    assert set(parts.SETUPS.values()) == set(parts.OTHER_SETUPS.values())


def test_the_first_row_decides():
    of_file = "tests/e2e/test_demo_model.py::test_greedy_output_is_plain_decodings"
    assert parts.part_of(f"{of_file}[SSSD-synchronous, embedded]") == parts.TEST
    assert parts.part_of(f"{of_file}[DOUBLE-synchronous, embedded]") == parts.REST


def test_a_folder_s_row_is_for_that_folder_alone():
    assert parts.part_of("tests/unit/benchmarks/test_load.py::test_it") == parts.REST
    assert parts.part_of("tests/unit/benchmarks_of_another/test_load.py::test_it") == parts.TEST


def test_one_process_collects_every_test():
    """Folders have parameters of the same names, and hooks that see each other's tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=os.environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    files = [file for file in TESTS.rglob("test_*.py") if file.parent.name != INTERPRETED]
    assert found == {str(file.relative_to(TESTS.parent)) for file in files}
