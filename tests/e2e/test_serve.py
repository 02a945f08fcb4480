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

from benchmarks.servers import one_architecture

READY_SECONDS = 420


class Launcher:
    """A running `python -m sglang_patches.demo.serve`."""

    def __init__(self, port: int, output: Path, **variables: str) -> None:
        self.output = output
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang_patches.demo.serve", "--max-total-tokens", "4096"],
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

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, *words: str) -> psutil.Process:
        """The direct child with these words in its command line."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if all(word in " ".join(child.cmdline()) for word in words))


@contextlib.contextmanager
def launched(port: int, output: Path, **variables: str) -> Iterator[Launcher]:
    launcher = Launcher(port, output, **variables)
    try:
        yield launcher
    finally:
        launcher.process.terminate()
        launcher.process.wait(60)


def complete(url: str) -> str:
    request = {
        "model": "default",
        "max_tokens": 16,
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    reply = requests.post(f"{url}/chat/completions", json=request, timeout=120)
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_answers_and_leaves_nothing_behind(demo_model, free_port, tmp_path, end):
    datastore = "grpc" if end == signal.SIGINT else "embedded"
    with launched(free_port, tmp_path / "out", DATASTORE=datastore) as launcher:
        url = launcher.wait_until_ready()
        assert "Paris" in complete(url)
        descendants = launcher.descendants()
        assert len(descendants) >= 3  # SGLang's server, scheduler and detokenizer
        launcher.process.send_signal(end)
        assert launcher.process.wait(60) == 0
        _, alive = psutil.wait_procs(descendants, timeout=5)
        assert alive == []
    assert "server_args=" not in (tmp_path / "out").read_text()


def test_a_datastore_that_dies_is_named_and_the_engine_stopped(demo_model, free_port, tmp_path):
    with launched(free_port, tmp_path / "out") as launcher:
        launcher.wait_until_ready()
        descendants = launcher.descendants()
        launcher.child("datastore_service").kill()
        assert launcher.process.wait(60) == 1
        _, alive = psutil.wait_procs(descendants, timeout=5)
        assert alive == []
    assert "error: datastore ended with status -9" in (tmp_path / "out").read_text()


def test_an_engine_that_cannot_start_is_named_with_its_own_words(demo_model, free_port, tmp_path):
    with launched(free_port, tmp_path / "out", MODEL=str(tmp_path), ALGORITHM="none") as launcher:
        assert launcher.process.wait(READY_SECONDS) == 1
    said = (tmp_path / "out").read_text()
    assert "error: engine ended with status" in said
    assert "config.json" in said.partition("error: engine ended")[2]
