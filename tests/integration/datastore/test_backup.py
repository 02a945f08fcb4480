"""Backups of a running service, by the command: what a restored service proposes."""

import json
import re

import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Opening
from tests.integration.datastore.conftest import VOCAB, specstore
from tests.integration.datastore.test_crash import ANSWER_SECONDS, NAMESPACE, Publisher, is_proposed, run
from tests.support.servers.datastore import DatastoreService
from tests.waiting import eventually


@pytest.fixture
def service(tmp_path):
    with served(tmp_path / "data") as process:
        yield process


def served(data):
    data.mkdir(exist_ok=True)
    return DatastoreService(data.with_suffix(".log"), "--data", data, "--vocab-size", VOCAB)


def connected(service):
    datastore = GrpcDatastore(service.endpoint, NAMESPACE)
    assert datastore.wait_connected(ANSWER_SECONDS)
    return datastore


def sealed(service) -> bool:
    """Whether a service that has started has made a segment of what its logs held."""
    tiers = [tier for namespace in service.stats().namespaces for tier in namespace.tiers]
    return any(tier.tier == Tier.LIVE and tier.segments for tier in tiers)


def drafts(service, contexts):
    """The tree after each context. Ties fall otherwise until the text is a segment, which is made in the background."""
    eventually(lambda: sealed(service), "the logs' text is no segment")
    datastore = connected(service)
    opening = Opening(publish=False, prompt_length=contexts.shape[1])
    trees = []
    for context in contexts:
        entry = Entry("q", tokens=context, budget=Budget(12, 8, 3), opening=opening, closing=True)
        tree = datastore.step([entry], ANSWER_SECONDS)[0].tree
        trees.append((tree.tokens.tolist(), tree.parents.tolist(), list(tree.sources)))
    datastore.close()
    return trees


def done(*words):
    process = specstore(*words)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_a_restored_service_drafts_as_the_original_does_once_restarted(service, tmp_path):
    random = np.random.default_rng(0)
    datastore = connected(service)
    outputs = random.integers(0, 40, (60, 50), dtype=np.int32)  # few ids, so that trees branch
    for number, output in enumerate(outputs):
        entry = Entry("s", tokens=output, opening=Opening(user=f"u{number % 3}"), closing=True)
        datastore.step([entry], ANSWER_SECONDS)
    datastore.close()
    store = tmp_path / "store"
    written = done("backup", tmp_path / "data", store, "--json")
    assert written["new"] == written["bytes"] > 6000
    again = done("backup", tmp_path / "data", f"file://{store}", "--keep", 1, "--json")
    assert (again["new"], again["dropped"]) == (0, 1)
    copy = tmp_path / "copy"
    restored = done("restore-backup", store, copy, "--json")
    assert (restored["backup"], restored["vocab_size"]) == (again["backup"], VOCAB)
    contexts = np.concatenate([outputs[:30, 20:30], random.integers(0, 40, (30, 10), dtype=np.int32)])
    service.kill()  # what is fresh is divided otherwise after a start, and ties fall otherwise
    service.start()
    original = drafts(service, contexts)
    assert sum(len(parents) > 8 for _, parents, _ in original) > 30, "hardly a tree: this shows nothing"
    with served(copy) as other:
        assert drafts(other, contexts) == original
    refused = specstore("restore-backup", store, copy)
    assert (refused.returncode, refused.stderr) == (
        1,
        f"specstore: {copy}: directory: not empty, it has directory.json\n",
    )
    assert again["backup"] in specstore("backups", store).stdout


def test_backups_under_load_have_all_that_was_answered_before(service, tmp_path):
    publishers = [Publisher(service.endpoint, number) for number in range(3)]
    for publisher in publishers:
        publisher.start()
    known = []
    for round_ in range(3):
        least = 60 * (round_ + 1)
        eventually(lambda least=least: all(len(publisher.answered) > least for publisher in publishers))
        known.append([output for publisher in publishers for output in list(publisher.answered)])
        done("backup", tmp_path / "data", tmp_path / "store", "--json")
    service.kill()
    for publisher in publishers:
        publisher.join()
    listed = done("backups", tmp_path / "store", "--json")["backups"]
    for number, (backup, outputs) in enumerate(zip(listed, known, strict=True)):
        copy = tmp_path / f"copy-{number}"
        done("restore-backup", tmp_path / "store", copy, "--backup", backup["backup"], "--json")
        with served(copy) as restored:
            datastore = connected(restored)
            assert all(is_proposed(datastore, output) for output in outputs)
            datastore.close()


def test_killed_at_every_call(tmp_path, pytestconfig):
    """At every call in the long run, else at every third and at the first of each kind."""
    every = 1 if pytestconfig.getoption("--long") else 3
    said = run("backup_workload", tmp_path / "trial", every)
    backups, restores = map(int, re.fullmatch(r"(\d+) points of backups, (\d+) of restores\n", said).groups())
    assert min(backups, restores) > 24 / every


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            ("backup", "nothing", "store"),
            1,
            "nothing: directory: no data directory of a service: it has no live/",
        ),
        (("backup", "nothing", "nonesuch://x"), 2, "backup: nonesuch://x: Protocol not known: nonesuch"),
        (("restore-backup", "nothing", "copy"), 2, "source: nothing has no backup"),
        (("restore-backup", "nothing", "copy", "--backup", "../x"), 2, "backup: '../x' is not a name"),
    ],
)
def test_what_the_commands_refuse(tmp_path, words, status, message):
    refused = specstore(*words, folder=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (status, 1)
    assert refused.stderr.startswith(f"specstore: {message}")
