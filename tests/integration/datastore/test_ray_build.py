"""`specstore build --ray` on a real Ray cluster of two workers, one of which is killed."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from datastore_service.storage.build import Progress, build_prior
from datastore_service.storage.errors import StorageError
from datastore_service.storage.ray_cluster import ATTEMPTS, RayCluster
from tests.integration.datastore.conftest import VOCAB, specstore
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install specstore[ray]"
)
# No token is written to the user's folder, and nothing is reported.
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
FILES, DOCUMENTS, TOKENS = 8, 400, 1000  # of the corpus, of a file, of a document
SEGMENT_TOKENS = 20_000
BUSY = "ray::_build_on_worker"  # what Ray calls a worker's process while it builds a part


@pytest.fixture(scope="module")
def head():
    """The process that has started the cluster, and its address."""
    command = [sys.executable, "-m", "tests.integration.datastore.ray_head"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            yield process, process.stdout.readline().strip()
            process.stdin.close()
            assert process.wait(60) == 0


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory) -> list[Path]:
    """Each file is a part of 20 segments."""
    folder, rng = tmp_path_factory.mktemp("parts"), np.random.default_rng(8)
    paths = [folder / f"{i}.jsonl" for i in range(FILES)]
    for path in paths:
        rows = rng.integers(0, VOCAB, (DOCUMENTS, TOKENS)).tolist()
        path.write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows))
    return paths


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_a_busy_worker(head: psutil.Process) -> int | None:
    """Its process id, None if none is at work. It is stopped first, so that it is surely at work when it is killed."""
    for process in head.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] != [BUSY]:
                continue
            process.suspend()
            if process.cmdline()[:1] == [BUSY]:
                process.kill()
                return process.pid
            process.resume()
    return None


def test_a_killed_worker_changes_no_byte(head, large_corpus, tokenizer, tmp_path):
    process, address = head
    killed: list[int] = []
    seen: list[Progress] = []

    def kill_once(progress: Progress) -> None:
        """At the first segment while a worker is busy: there are more parts than are built at a time."""
        seen.append(progress)
        if not killed and (busy := kill_a_busy_worker(psutil.Process(process.pid))):
            killed.append(busy)

    options = {"field": "ids", "segment_tokens": SEGMENT_TOKENS}
    with RayCluster(address) as cluster:
        build_prior(
            large_corpus, tmp_path / "ray", tokenizer, progress=kill_once, builder=cluster.build, **options
        )
    assert killed
    eventually(lambda: not psutil.pid_exists(killed[0]))
    assert len(seen) == FILES * DOCUMENTS * TOKENS // SEGMENT_TOKENS
    build_prior(large_corpus, tmp_path / "here", tokenizer, **options)
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")


def test_the_command_builds_the_same_prior(head, corpus, prior, tokenizer, tmp_path):
    done = specstore(
        "build", corpus[0].name, "--out", tmp_path / "prior", "--tokenizer", tokenizer, "--field", "ids", "--ray", head[1],
        folder=corpus[0].parent, **QUIET,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(tmp_path / "prior") == contents(prior)


def test_a_bad_document_is_named_by_its_worker(head, tokenizer, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"ids": [1, VOCAB]}) + "\n")
    with (
        RayCluster(head[1]) as cluster,
        pytest.raises(StorageError, match=rf"bad\.jsonl: document 1: tokens: id {VOCAB} is outside"),
    ):
        build_prior([bad], tmp_path / "prior", tokenizer, field="ids", builder=cluster.build)


# Every worker but those of the first part dies as soon as it works. A function of the main module reaches the workers as it stands here.
DYING = """
import os, signal, sys
from pathlib import Path
from datastore_service.storage import ray_cluster
from datastore_service.storage.build import build_prior

def build_or_die(recipe, part):
    from datastore_service.storage.parts import build_part
    if part.number:
        with open(died, "a") as log:
            print(part.paths[0], file=log)
        os.kill(os.getpid(), signal.SIGKILL)
    yield from build_part(recipe, part, threads=1)

address, died, prior, tokenizer, segment_tokens, *corpus = sys.argv[1:]
ray_cluster._build_on_worker = build_or_die
with ray_cluster.RayCluster(address) as cluster:
    build_prior(corpus, prior, Path(tokenizer), "ids", int(segment_tokens), builder=cluster.build)
"""


def test_a_part_whose_workers_always_die_is_named(head, large_corpus, tokenizer, tmp_path):
    """What is in the prior by then stays, and the build goes on there."""
    died, prior = tmp_path / "died", tmp_path / "prior"
    words = [head[1], died, prior, tokenizer, SEGMENT_TOKENS, *large_corpus]
    command = [sys.executable, "-c", DYING, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | QUIET, timeout=600)
    assert f"OSError: ray: the part that begins with {large_corpus[1]} was not built" in done.stderr
    assert died.read_text().split().count(str(large_corpus[1])) == ATTEMPTS
    options = {"field": "ids", "segment_tokens": SEGMENT_TOKENS}
    build_prior(large_corpus, prior, tokenizer, **options)
    build_prior(large_corpus, tmp_path / "here", tokenizer, **options)
    assert contents(prior) == contents(tmp_path / "here")
