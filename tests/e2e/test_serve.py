"""The launcher for real: ready, answering, gone without a trace; and what it says when a part of it dies."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from sglang_patches.launch.system import SPLIT
from tests.support.servers.engine import one_architecture
from tests.support.system import require

READY_SECONDS = 420
ENDED_SECONDS = 120  # four parts have 15 seconds each, one after the other


class Launcher:
    """A running launcher. ended_with: its descendants when it was last told to end, or one of them was ended."""

    def __init__(self, port: int, output: Path, module: str, **variables: str) -> None:
        self.output = output
        self.ended_with: list[psutil.Process] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--max-total-tokens", "4096"],
            env=os.environ | one_architecture() | {"PORT": str(port)} | variables,
            stdin=subprocess.DEVNULL,
            stdout=output.open("w"),
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self) -> str:
        """The URL it announces."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"^ready in .*: (http\S+)", self.output.read_text(), re.MULTILINE):
                return found[1]
            time.sleep(0.5)
        raise AssertionError(self.output.read_text()[-4000:])

    def wait_for(self, words: str, count: int) -> None:
        """Until so many of its descendants have these words in their command line."""
        deadline = time.monotonic() + READY_SECONDS
        while sum(words in _command(child) for child in self._descendants()) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.output.read_text()[
                -4000:
            ]
            time.sleep(0.2)

    def child(self, words: str) -> psutil.Process:
        """The direct child with these words in its command line, before it is ended."""
        self.ended_with = self._descendants()
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if words in _command(child))

    def signal(self, number: int) -> None:
        self.ended_with = self._descendants()
        self.process.send_signal(number)

    def _descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@contextlib.contextmanager
def launched(
    port: int, output: Path, module: str = "sglang_patches.launch.serve", **variables: str
) -> Iterator[Launcher]:
    launcher = Launcher(port, output, module, **variables)
    try:
        yield launcher
    finally:
        launcher.process.terminate()
        launcher.process.wait(ENDED_SECONDS)


def complete(url: str) -> str:
    request = {
        "model": "default",
        "max_tokens": 16,
        "temperature": 0,
        # Each word of the answer is far ahead of the next likely one: bfloat16 rounds differently from batch to batch.
        "messages": [{"role": "user", "content": "Name the capital of France in one sentence."}],
    }
    reply = requests.post(f"{url}/chat/completions", json=request, timeout=120)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def ends_without_a_trace(launcher: Launcher, status: int) -> None:
    descendants = launcher.ended_with
    assert launcher.process.wait(ENDED_SECONDS) == status
    _, alive = psutil.wait_procs(descendants, timeout=60)
    assert alive == []


def test_it_answers_and_leaves_nothing_behind(demo_model, free_port, tmp_path):
    with launched(free_port, tmp_path / "out") as launcher:
        url = launcher.wait_until_ready()
        assert "Paris" in complete(url)
        launcher.signal(signal.SIGINT)
        ends_without_a_trace(launcher, 0)
    assert "server_args=" not in (tmp_path / "out").read_text()


@pytest.mark.parametrize(
    ("module", "engines", "packages"),
    [("sglang_patches.launch.serve", 1, ()), ("sglang_patches.launch.serve_pd", 2, SPLIT)],
)
def test_stopped_while_it_starts_it_leaves_nothing_behind(
    demo_model, free_port, tmp_path, module, engines, packages
):
    require(*packages)
    with launched(free_port, tmp_path / "out", module) as launcher:
        launcher.wait_for("multiprocessing.spawn", engines)
        launcher.signal(signal.SIGTERM)
        ends_without_a_trace(launcher, 0)


def test_a_datastore_that_dies_is_named_and_the_engine_stopped(demo_model, free_port, tmp_path):
    with launched(free_port, tmp_path / "out") as launcher:
        launcher.wait_for("sglang.launch_server", 1)
        launcher.child("datastore_service").kill()
        ends_without_a_trace(launcher, 1)
    assert "error: datastore ended with status -9" in (tmp_path / "out").read_text()


def test_an_engine_that_cannot_start_is_named_with_its_own_words(demo_model, free_port, tmp_path):
    with launched(free_port, tmp_path / "out", MODEL=str(tmp_path), ALGORITHM="none") as launcher:
        assert launcher.process.wait(READY_SECONDS) == 1
    said = (tmp_path / "out").read_text()
    assert "error: engine ended with status" in said
    assert "config.json" in said.partition("error: engine ended")[2]
