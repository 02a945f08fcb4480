"""kill -9: of the live tier at every call that changes a file, and of a whole service under load."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from tests.integration.datastore.conftest import VOCAB, specstore
from tests.support.servers.datastore import DatastoreService
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
NAMESPACE = Namespace("m", "ab" * 32)
NAME = ("--model", "m", "--tokenizer", "ab" * 32)
ANSWER_SECONDS = 60.0


@pytest.mark.parametrize("workload", ["mixed", "evicting", "forgetting", "encrypting"])
def test_killed_at_every_call(workload, tmp_path, pytestconfig):
    """At every call in the long run, else at every fifth and at the first of each kind."""
    every = 1 if pytestconfig.getoption("--long") else 5
    said = run("crash_workload", workload, tmp_path / "trial", every)
    assert int(re.fullmatch(r"(\d+) points\n", said)[1]) > 80 / every


def test_a_hundred_of_a_thousand_subjects_are_forgotten(tmp_path, pytestconfig):
    """At the first call of each kind and at every so many: of ten million tokens in the long run, else of a few."""
    long = pytestconfig.getoption("--long")
    tokens, every = (10_000_000, 60) if long else (40_000, 20)
    said = run("forget_workload", tmp_path / "trial", tokens, every, timeout=3600 if long else 300)
    killed, calls = map(int, re.fullmatch(r"(\d+) points of (\d+) calls\n", said).groups())
    assert calls > 100 and killed > calls / every


def run(workload: str, *words: object, timeout: float = 300) -> str:
    """What a workload prints."""
    command = [sys.executable, "-m", f"tests.integration.datastore.{workload}", *map(str, words)]
    # One thread: a fork of a process in which OpenMP has threads may wait for them for ever.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Publisher(threading.Thread):
    """Opens and closes sessions, one after the other, until the service is gone."""

    def __init__(self, endpoint: str, number: int) -> None:
        super().__init__()
        self._datastore = GrpcDatastore(endpoint, NAMESPACE)
        self._random = np.random.default_rng(number)
        self._number = number
        self.answered: list[np.ndarray] = []

    def run(self) -> None:
        assert self._datastore.wait_connected(ANSWER_SECONDS)
        try:
            while True:
                self._publish(self._random.integers(0, VOCAB, 40, dtype=np.int32))
        except DatastoreError:
            pass  # it was killed: what this is about
        finally:
            self._datastore.close()

    def _publish(self, output: np.ndarray) -> None:
        name = f"{self._number}-{len(self.answered)}"
        entry = Entry(name, tokens=output, opening=Opening(), closing=True)
        (reply,) = self._datastore.step([entry], ANSWER_SECONDS)
        assert reply.status is Status.OK
        self.answered.append(output)


def is_proposed(datastore: GrpcDatastore, output: np.ndarray) -> bool:
    opening = Opening(publish=False, prompt_length=16)
    entry = Entry("q", tokens=output[:16], budget=Budget(8, 8, 1), opening=opening, closing=True)
    tree = datastore.step([entry], ANSWER_SECONDS)[0].tree
    return tree.tokens.tolist() == output[16:24].tolist() and set(tree.sources) == {Tier.LIVE}


@pytest.fixture
def service(tmp_path):
    (tmp_path / "data").mkdir()
    with DatastoreService(tmp_path / "log", "--data", tmp_path / "data", "--vocab-size", VOCAB) as process:
        yield process


def test_a_killed_service_proposes_all_it_answered(service):
    outputs: list[np.ndarray] = []
    for round_ in range(2):
        publishers = [Publisher(service.endpoint, 10 * round_ + i) for i in range(4)]
        for publisher in publishers:
            publisher.start()
        eventually(lambda writing=publishers: all(len(publisher.answered) > 100 for publisher in writing))
        service.kill()
        for publisher in publishers:
            publisher.join()
            outputs += publisher.answered
        service.start()
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(ANSWER_SECONDS)
    assert all(is_proposed(datastore, output) for output in outputs)
    datastore.close()
    listed = json.loads(specstore("namespaces", "--json", "--endpoint", service.endpoint).stdout)
    assert [namespace["tokenizer"] for namespace in listed["namespaces"]] == [NAMESPACE.tokenizer]
    assert "namespace restored" in service.logs()


def test_a_killed_service_has_forgotten_whom_it_said(service):
    at = ("--endpoint", service.endpoint)
    outputs = np.random.default_rng(0).integers(0, VOCAB, (40, 40), dtype=np.int32)
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(ANSWER_SECONDS)
    for number, output in enumerate(outputs):
        opening = Opening(user=f"u{number % 4}")
        datastore.step([Entry("s", tokens=output, opening=opening, closing=True)], ANSWER_SECONDS)
    assert specstore("snapshot", "a", *NAME, *at).returncode == 0
    said = specstore("forget", "--subject", "user:u1", "--subject", "user:u3", "--verify", *at).stdout
    assert said.startswith("removed 40 documents, 1600 tokens") and "none of the subjects is left" in said
    service.kill()
    datastore.close()
    service.start()
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(ANSWER_SECONDS)
    for restored in (False, True):
        found = [is_proposed(datastore, output) for output in outputs]
        assert found == [number % 2 == 0 for number in range(40)], restored
        at = ("--endpoint", service.endpoint)
        assert specstore("restore", "a", *NAME, *at).stdout.startswith("live tier: 800 tokens")
    datastore.close()


def test_two_services_do_not_share_a_data_directory(service, tmp_path):
    (tmp_path / "data" / "lock").unlink(missing_ok=True)  # what an operator does who takes the first for dead
    second = specstore("serve", "--listen", "127.0.0.1:0", "--data", tmp_path / "data", "--vocab-size", VOCAB)
    assert second.returncode == 1
    assert second.stderr.endswith("lock: another process writes here\n")
    assert second.stderr.count("\n") == 1


def test_a_damaged_log_stops_the_start_in_one_line(service, tmp_path):
    publisher = Publisher(service.endpoint, 0)
    publisher.start()
    eventually(lambda: len(publisher.answered) > 1)
    service.kill()
    publisher.join()
    log = max((tmp_path / "data" / "live").glob("*/*.log"))
    data = bytearray(log.read_bytes())
    data[80] ^= 1
    log.write_bytes(data)
    refused = specstore(
        "serve", "--listen", "127.0.0.1:0", "--data", tmp_path / "data", "--vocab-size", VOCAB
    )
    assert refused.returncode == 1
    assert f"{log}: offset 64: checksum does not match" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_snapshots_from_the_command_line(service):
    at = ("--endpoint", service.endpoint)
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(ANSWER_SECONDS)
    output = np.arange(100, 200, dtype=np.int32)
    datastore.step([Entry("s", tokens=output, opening=Opening(), closing=True)], ANSWER_SECONDS)
    assert specstore("snapshot", "a", *NAME, *at).stdout == "snapshot a: 100 tokens in 1 segments\n"
    again = specstore("snapshot", "a", *NAME, *at)
    assert (again.returncode, again.stderr) == (
        1,
        "specstore: name: there is a snapshot 'a'\n",
    )
    datastore.step([Entry("s", tokens=output[::-1], opening=Opening(), closing=True)], ANSWER_SECONDS)
    listed = json.loads(specstore("snapshots", *NAME, *at, "--json").stdout)["snapshots"]
    assert [(snapshot["name"], snapshot["tokens"]) for snapshot in listed] == [("a", "100")]
    assert "made (UTC)" in specstore("snapshots", *NAME, *at).stdout
    assert specstore("restore", "a", *NAME, *at).stdout == "live tier: 100 tokens in 1 segments\n"
    assert is_proposed(datastore, output) and not is_proposed(datastore, output[::-1])
    datastore.close()
