"""Real service processes, a small tokenizer and a prior built with the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, models, pre_tokenizers

from datastore_service.client.channel import open_channel
from datastore_service.tls import Tls
from sglang_patches.launch.processes import free_port

SPECSTORE = [sys.executable, "-m", "datastore_service.cli.main"]
VOCAB = 2000
START_SECONDS = 60.0


def specstore(*words: object, **environment: str) -> subprocess.CompletedProcess:
    command = [*SPECSTORE, *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


class Process:
    """`specstore serve` in a process group of its own; the same address each time it starts. tls: of a client of it."""

    def __init__(self, log: Path, *flags: object, tls: Tls | None = None) -> None:
        self.endpoint, self._log, self._flags = f"127.0.0.1:{free_port()}", log, flags
        self._tls = tls

    def start(self) -> Process:
        words = [*SPECSTORE, "serve", "--listen", self.endpoint, *map(str, self._flags)]
        with self._log.open("ab") as output:
            self.popen = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        limit = time.monotonic() + START_SECONDS
        while not self.serving():
            assert self.popen.poll() is None and time.monotonic() < limit, self.logs()
            time.sleep(0.05)
        return self

    def serving(self) -> bool:
        with open_channel(self.endpoint, self._tls) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                return False
        return reply.status == health_pb2.HealthCheckResponse.SERVING

    def signal(self, number: int) -> None:
        os.kill(self.popen.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self.popen.kill()
        self.popen.wait(10)

    def logs(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Process:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.kill()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A folder with a tokenizer.json of whole words w0 ... w1999."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "w")


def write_tokenizer(folder: Path, prefix: str) -> Path:
    words = {f"{prefix}{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"{prefix}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> tuple[Path, np.ndarray]:
    """300,000 token ids in 300 documents; the texts are random, so each continues in one way only."""
    documents = np.random.default_rng(5).integers(0, VOCAB, (300, 1000))
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"ids": row.tolist()}) + "\n" for row in documents))
    return path, documents


@pytest.fixture(scope="session")
def prior(corpus, tokenizer, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prior") / "prior"
    done = specstore("build", corpus[0], "--out", out, "--tokenizer", tokenizer, "--field", "ids")
    assert done.returncode == 0, done.stderr
    return out
