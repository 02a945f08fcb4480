"""Real service processes, a small tokenizer and a prior built with the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.servers.share import ShareServer

SPECSTORE = [sys.executable, "-m", "datastore_service.cli.main"]
VOCAB = 2000
START_SECONDS = 60.0


def specstore(*words: object, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """folder: in which the command runs."""
    command = [*SPECSTORE, *map(str, words)]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"} | environment,
    )


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


@pytest.fixture
def share(tmp_path):
    with ShareServer(tmp_path / "share") as server:
        yield server


@pytest.fixture
def members(share, tmp_path):
    """Makes services of names, which share over `share` and end with the test."""
    from tests.integration.datastore.sharing import Member

    with ExitStack() as ends:

        def make(name: str, *flags: object, data: bool = True) -> Member:
            member = Member(share, tmp_path / name, *flags, data=data)
            ends.push(member.service)
            ends.callback(member.close)
            return member.start()

        yield make
