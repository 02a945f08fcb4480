"""`requirements/env.sh`, with a stand-in for uv that records what it is asked: when an environment is trusted."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]

UV = """#!/bin/bash
echo "$*" >> "$UV_CALLS"
case "$1 $*" in
  venv*) mkdir -p "${@: -1}/bin" ;;
  *"-r "*) [ ! -e "$UV_CALLS.fail" ] || kill -9 $PPID ;;
esac
"""


class Checkout:
    """A copy of what env.sh reads, and the stand-in."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root, self.calls_file = folder, root, root.parent / "calls"
        (folder / "requirements").mkdir(parents=True)
        shutil.copy(CHECKOUT / "requirements" / "env.sh", folder / "requirements")
        (folder / "requirements" / "lock.txt").write_text("numpy==2.3.5\n")
        (folder / "pyproject.toml").write_text("[project]\nname = 'specstore'\n")
        tools = root.parent / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "uv").write_text(UV)
        (tools / "uv").chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SPECSTORE_ENV_ROOT": str(root),
            "UV_CALLS": str(self.calls_file),
        }

    def make(self, *name: str) -> subprocess.CompletedProcess:
        self.calls_file.unlink(missing_ok=True)
        command = [self.folder / "requirements" / "env.sh", *name]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        """What uv was asked for, in order."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [
            "venv" if "venv" in line else "lock" if "-r " in line else "project"
            for line in lines
            if " " in line
        ]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "checkout", tmp_path / "root")


def test_the_path_is_printed_last_and_a_second_make_does_nothing(checkout):
    first = checkout.make()
    assert checkout.calls() == ["venv", "lock", "project"]
    second = checkout.make()
    assert checkout.calls() == []
    assert first.returncode == second.returncode == 0
    assert Path(first.stdout.splitlines()[-1]).parent == checkout.root
    assert second.stdout == first.stdout


def test_an_interrupted_install_is_made_anew(checkout):
    broken = Path(f"{checkout.calls_file}.fail")
    broken.touch()
    assert checkout.make().returncode != 0
    broken.unlink()
    assert checkout.make().returncode == 0
    assert checkout.calls() == ["venv", "lock", "project"]


def test_another_lock_is_another_environment(checkout):
    first = checkout.make().stdout
    (checkout.folder / "requirements" / "lock.txt").write_text("numpy==2.3.4\n")
    assert checkout.make().stdout != first
    assert checkout.calls() == ["venv", "lock", "project"]


def test_another_checkout_takes_the_environment_over(checkout, tmp_path):
    mine = checkout.make().stdout
    other = Checkout(tmp_path / "other", checkout.root)
    assert other.make().stdout == mine
    assert other.calls() == ["project"]
    assert checkout.make().stdout == mine
    assert checkout.calls() == ["project"]


def test_changed_project_metadata_is_installed_again(checkout):
    checkout.make()
    (checkout.folder / "pyproject.toml").write_text("[project]\nname = 'specstore'\nversion = '2'\n")
    checkout.make()
    assert checkout.calls() == ["project"]


def test_another_name_is_another_lock(checkout):
    (checkout.folder / "requirements" / "sglang-1.txt").write_text("numpy==2.3.4\n")
    assert checkout.make("sglang-1").stdout != checkout.make().stdout


@pytest.mark.parametrize(
    "path", sorted((CHECKOUT / "requirements").glob("*.txt")), ids=lambda path: path.name
)
def test_the_lock_names_no_index(path):
    lock = path.read_text()
    assert "//" not in lock
    assert "--index" not in lock


def test_each_tested_sglang_has_a_lock():
    versions = pytest.importorskip("sglang_patches.versions")
    locks = [path.read_text() for path in (CHECKOUT / "requirements").glob("*.txt")]
    assert len(locks) == len(versions.TESTED)
    for tested in versions.TESTED:
        assert sum(f"\nsglang=={tested}\n" in lock for lock in locks) == 1
