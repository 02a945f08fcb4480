"""`requirements/env.sh`, with a stand-in for uv that records what it is asked: when an environment is trusted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]

# Packages of a lock are a module and a program that says which code it runs; the project is the module's `own`.
UV = """#!/bin/bash
echo "$*" >> "$UV_CALLS"
target=${@: -1}
case "$1 $*" in
  venv*) "$UV_PYTHON" -m venv --without-pip "$target" ;;
  *"-r "*)
    [ ! -e "$UV_CALLS.fail" ] || kill -9 $PPID
    folder=$(dirname "$(dirname "$4")")
    echo 'import own; print(own.__file__)' > "$folder"/lib/python3.11/site-packages/package.py
    printf '#!%s\nimport package\n' "$4" > "$folder/bin/program"
    chmod +x "$folder/bin/program" ;;
  *"-e "*) echo "$target" > "$(dirname "$(dirname "$5")")/lib/python3.11/site-packages/_editable.pth" ;;
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
        (folder / "own.py").touch()
        tools = root.parent / "bin"
        tools.mkdir(exist_ok=True)
        (tools / "uv").write_text(UV)
        (tools / "uv").chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SPECSTORE_ENV_ROOT": str(root),
            "UV_CALLS": str(self.calls_file),
            "UV_PYTHON": sys.executable,
        }

    def make(self, *name: str) -> subprocess.CompletedProcess:
        self.calls_file.unlink(missing_ok=True)
        command = [self.folder / "requirements" / "env.sh", *name]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)

    def run(self, command: str) -> str:
        """What a shell prints whose PATH begins with the environment, as `make` has it."""
        path = f"{self.make().stdout.strip()}/bin:{os.environ['PATH']}"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "PATH": path
        }
        done = subprocess.run(
            ["bash", "-c", command], env=environment, capture_output=True, text=True, cwd="/"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

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
    assert checkout.calls() == ["venv", "lock", "venv", "project"]
    second = checkout.make()
    assert checkout.calls() == []
    assert first.returncode == second.returncode == 0
    assert checkout.root in Path(first.stdout.splitlines()[-1]).parents
    assert second.stdout == first.stdout


def test_an_interrupted_install_is_made_anew(checkout):
    broken = Path(f"{checkout.calls_file}.fail")
    broken.touch()
    assert checkout.make().returncode != 0
    broken.unlink()
    assert checkout.make().returncode == 0
    assert checkout.calls() == ["venv", "lock", "venv", "project"]


def test_another_lock_is_another_environment(checkout):
    first = checkout.make().stdout
    (checkout.folder / "requirements" / "lock.txt").write_text("numpy==2.3.4\n")
    assert checkout.make().stdout != first
    assert checkout.calls() == ["venv", "lock", "venv", "project"]


def test_checkouts_share_the_packages_and_nothing_else(checkout, tmp_path):
    mine = checkout.make().stdout
    other = Checkout(tmp_path / "other", checkout.root)
    assert other.make().stdout != mine
    assert other.calls() == ["venv", "project"]
    assert checkout.make().stdout == mine
    assert checkout.calls() == []


CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import package'], check=True)"


@pytest.mark.parametrize("command", ["program", "python -c 'import package'", f'python -c "{CHILD}"'])
def test_programs_and_children_run_their_checkout_s_code(checkout, tmp_path, command):
    other = Checkout(tmp_path / "other", checkout.root)
    for each in (checkout, other, checkout):
        assert each.run(command) == f"{each.folder}/own.py"


def test_changed_project_metadata_is_installed_again(checkout):
    mine = checkout.make().stdout
    (checkout.folder / "pyproject.toml").write_text("[project]\nname = 'specstore'\nversion = '2'\n")
    assert checkout.make().stdout == mine
    assert checkout.calls() == ["venv", "project"]
    assert checkout.run("program") == f"{checkout.folder}/own.py"


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
    versions = pytest.importorskip("sglang_patches.host.versions")
    locks = [path.read_text() for path in (CHECKOUT / "requirements").glob("*.txt")]
    assert len(locks) == len(versions.TESTED)
    for tested in versions.TESTED:
        assert sum(f"\nsglang=={tested}\n" in lock for lock in locks) == 1
