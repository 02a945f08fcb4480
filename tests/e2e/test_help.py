"""Every program answers `--help`, and does nothing else."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.servers.engine import CPU_ENVIRONMENT, one_architecture
from tests.support.servers.forked import ForkedChild

CHECKOUT = Path(__file__).parents[2]
# Of tests only what people run: the others are started by a test.
FOLDERS = ("benchmarks", "datastore_service", "deploy", "docs", "proto_gen", "sglang_patches", "tests/soak")


def programs() -> list[str]:
    """The modules that `python -m` runs."""
    files = [
        CHECKOUT / "tests" / "lanes.py",
        *(f for folder in FOLDERS for f in (CHECKOUT / folder).rglob("*.py")),
    ]
    found = [
        file for file in files if re.search(r"^if __name__ == .__main__.:", file.read_text(), re.MULTILINE)
    ]
    return sorted(
        ".".join(f.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__main__") for f in found
    )


def test_the_scan_finds_packages_and_modules():
    assert {"sglang_patches.check", "benchmarks.rpc", "docs.worked_example", "tests.lanes"} <= set(programs())


@pytest.mark.parametrize("program", programs())
def test_a_program_answers_help_and_ends(tmp_path, program):
    command = [sys.executable, "-m", program, "--help"]
    child = ForkedChild(program, command, one_architecture() | CPU_ENVIRONMENT, tmp_path / "log", show=False)
    try:
        status = child.wait(60)
    finally:
        child.kill()
    said = child.log.read_text()
    assert status == 0, said
    assert re.search(r"^ ?usage: ", said, re.IGNORECASE | re.MULTILINE) and "--help" in said, said
