"""What the system lacks is told at once, in one line with the command to type."""

import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_patches.launch import serve, system
from tests.support.servers.engine import ServerSpec
from tests.support.servers.forked import running_split
from tests.support.system import require

CHECKOUT = Path(__file__).parents[3]
LINE = "this machine lacks libibverbs1: apt-get install libibverbs1"
OF_THE_COMPILER = r"ld-linux|lib(c|m|dl|pthread|resolv|stdc\+\+|gcc_s)\.so"


@pytest.fixture
def without_verbs(monkeypatch):
    monkeypatch.setitem(system.PACKAGES, "libibverbs1", "libibverbs.so.none")


def test_a_machine_that_has_everything_lacks_nothing(monkeypatch):
    monkeypatch.setattr(system, "PACKAGES", {"libc6": "libc.so.6", "bash": "bash"})
    assert system.lacking("libc6", "bash") == "" == system.lacking()


def test_what_is_missing_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(
        system, "PACKAGES", {"libc6": "libc.so.6", "liba": "liba.so.9", "b": "no-such-program"}
    )
    assert system.lacking("b", "libc6", "liba") == "this machine lacks b, liba: apt-get install b liba"


@pytest.mark.parametrize(("use", "said"), [("split", f"split: {LINE}"), ("tests", f"tests: {LINE}")])
def test_the_program_says_it_and_fails(without_verbs, monkeypatch, use, said):
    for package in set(system.PACKAGES) - {"libibverbs1"}:
        monkeypatch.setitem(system.PACKAGES, package, "bash")
    monkeypatch.setattr("sys.argv", ["system.py", use])
    with pytest.raises(SystemExit, match=f"^{said}$"):
        system.main()


def test_make_serve_pd_asks_before_it_makes_the_environment(tmp_path):
    stub = tmp_path / "python3"
    stub.write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SPECSTORE_ENV_ROOT": str(tmp_path / "root")}
    done = subprocess.run(
        ["make", "serve-pd"],
        cwd=CHECKOUT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stdout == "sglang_patches/launch/system.py split\n"
    assert not (tmp_path / "root").exists()


def test_any_python_can_ask():
    """Without the packages of the environment."""
    program = CHECKOUT / "sglang_patches" / "launch" / "system.py"
    command = [sys.executable, "-I", "-S", program, "split"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == bool(system.lacking(*system.SPLIT)) and "Traceback" not in done.stderr


def test_a_split_asks_for_all_that_mooncake_is_linked_with():
    require("g++")  # which brings readelf
    folder = Path(find_spec("mooncake").origin).parent
    shipped = {file.name for file in folder.parent.glob("mooncake*/*.so*")}
    needed: set[str] = set()
    for library in folder.glob("*.so"):
        told = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", told))
    of_others = {name for name in needed - shipped if not re.match(OF_THE_COMPILER, name)}
    assert of_others == {system.PACKAGES[package] for package in system.SPLIT}


@pytest.fixture
def launch(without_verbs, monkeypatch, free_port):
    """Status of a launcher that would start nothing, and whether it came so far."""
    monkeypatch.setattr("signal.signal", lambda *words: None)
    monkeypatch.setattr("sys.argv", ["serve"])
    for variable, value in {"ALGORITHM": "none", "DEVICE": "cpu", "PORT": str(free_port)}.items():
        monkeypatch.setenv(variable, value)

    def launch(role: str = "", **words) -> tuple[int, bool]:
        monkeypatch.setenv("ROLE", role)
        started: list = []
        return serve.main(lambda *given: started.append(given), **words), bool(started)

    return launch


@pytest.mark.parametrize("words", [{"split": True}, {"role": "prefill"}, {"role": "decode"}])
def test_an_instance_of_a_split_does_not_start(launch, capsys, words):
    assert launch(**words) == (2, False)
    assert capsys.readouterr().err == f"error: {LINE}\n"


def test_one_instance_alone_needs_none_of_it(launch):
    assert launch() == (0, True)


def test_make_serve_pd_is_a_split(monkeypatch):
    asked: list[dict] = []
    monkeypatch.delitem(sys.modules, "sglang_patches.launch.serve_pd", raising=False)
    monkeypatch.setattr(serve, "main", lambda run, **words: asked.append(words))
    with pytest.raises(SystemExit):
        runpy.run_module("sglang_patches.launch.serve_pd", run_name="__main__")
    assert [words["split"] for words in asked] == [True]


def test_a_test_of_a_split_says_it_too(without_verbs, tmp_path):
    with pytest.raises(pytest.skip.Exception, match=f"^{LINE}$"):
        running_split(ServerSpec("split", tmp_path), tmp_path)
