"""`--help` of every installed command: it imports nothing that takes seconds, starts no process and opens no connection.

tests/e2e/test_help.py reads what each says; tests/unit/benchmarks/test_help.py has the benchmarks.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from datastore_service.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
SLOW = {"llvmlite", "matplotlib", "numba", "pyarrow", "ray", "scipy", "sglang", "torch", "transformers"}
# Audit events (PEP 578). Not binding a socket: urllib3 does so when it is imported, to see whether there is IPv6.
STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "socket.connect", "subprocess.Popen"}
COMPILES = "datastore_service.engine.precompile"  # needs Numba, and is run where an image is built
# A fresh interpreter runs this: each of the commands with --help, as `python -m` would. What it says is a list of JSON.
RUN = """
import contextlib, io, json, runpy, sys
events = set()
sys.addaudithook(lambda event, _: events.add(event))
said = []
for program, *words in json.loads(sys.argv[1]):
    sys.argv = [program, *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code, end.code
    said.append([out.getvalue(), sorted(sys.modules), sorted(events)])
print(json.dumps(said))
"""


def programs() -> list[str]:
    """What `python -m` runs of the two packages that are installed."""
    folders = (ROOT / "datastore_service", ROOT / "sglang_patches")
    found = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for folder in folders
        for file in folder.rglob("*.py")
        if re.search(r"^if __name__ == .__main__.:", file.read_text(), re.MULTILINE)
    }
    return sorted(found - {COMPILES})


def ask(*commands: list[str]) -> list[tuple[str, set[str], set[str]]]:
    """What each command's help says; the slow modules and the starts of this process until then."""
    words = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return [
        (said, SLOW.intersection(modules), STARTS.intersection(events)) for said, modules, events in found
    ]


@pytest.mark.parametrize("program", programs())
def test_a_programs_help_starts_nothing(program):
    ((said, slow, starts),) = ask([program])
    assert "usage: " in said.lower()
    assert not slow and not starts


def test_the_help_of_each_specstore_command_starts_nothing():
    names = [command.__name__.replace("_", "-") for panel in COMMANDS.values() for command in panel]
    for name, (said, slow, starts) in zip(
        names, ask(*(["datastore_service.cli.main", name] for name in names)), strict=True
    ):
        assert f" {name} [OPTIONS]" in " ".join(said.split())
        assert not slow and not starts, name


def test_what_is_slow_is_seen():
    """The program that is left out above has it."""
    ((_, slow, _),) = ask([COMPILES])
    assert {"llvmlite", "numba"} <= slow
