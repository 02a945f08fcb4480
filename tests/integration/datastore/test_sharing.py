"""Several real services that share their outputs over a real server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from tests.integration.datastore.conftest import VOCAB
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.share import ShareServer
from tests.waiting import eventually

NAMESPACE = Namespace("m", "ab" * 32)
LENGTH = 40
ANSWER_SECONDS = 60.0


class Member:
    """A service that shares, and a client of it for each namespace."""

    def __init__(self, share: ShareServer, folder: Path, *flags: object, data: bool = True) -> None:
        folder.mkdir()
        (folder / "data").mkdir()
        kept = ("--data", folder / "data") if data else ()
        self.service = DatastoreService(
            folder / "log", "--share", share.url, "--vocab-size", VOCAB, *kept, *flags
        )
        self._clients: dict[Namespace, GrpcDatastore] = {}

    def start(self) -> Member:
        self.service.start()
        return self

    def kill(self) -> None:
        self.close()
        self.service.kill()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def publish(self, output: np.ndarray, namespace: Namespace = NAMESPACE, user: str = "") -> None:
        entry = Entry("s", tokens=output, opening=Opening(user=user), closing=True)
        (reply,) = self._client(namespace).step([entry], ANSWER_SECONDS)
        assert reply.status is Status.OK

    def proposes(self, output: np.ndarray, namespace: Namespace = NAMESPACE) -> bool:
        opening = Opening(publish=False, prompt_length=16)
        entry = Entry("q", tokens=output[:16], budget=Budget(8, 8, 1), opening=opening, closing=True)
        tree = self._client(namespace).step([entry], ANSWER_SECONDS)[0].tree
        return tree.tokens.tolist() == output[16:24].tolist() and set(tree.sources) == {Tier.LIVE}

    def tokens(self, namespace: Namespace = NAMESPACE) -> int:
        """Of the live tier, a separator for each output among them."""
        for each in self.service.stats().namespaces:
            if (each.namespace.model, each.namespace.tenant) == (namespace.model, namespace.tenant):
                return sum(tier.tokens for tier in each.tiers if tier.tier == Tier.LIVE)
        return 0

    def _client(self, namespace: Namespace) -> GrpcDatastore:
        if namespace not in self._clients:
            client = GrpcDatastore(self.service.endpoint, namespace)
            assert client.wait_connected(ANSWER_SECONDS)
            self._clients[namespace] = client
        return self._clients[namespace]


def outputs(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, LENGTH), dtype=np.int32)


@pytest.fixture
def share(tmp_path):
    with ShareServer(tmp_path / "share") as server:
        yield server


@pytest.fixture
def members(share, tmp_path):
    """Makes services of names, which end with the test."""
    made: list[Member] = []

    def make(name: str, *flags: object, data: bool = True) -> Member:
        made.append(Member(share, tmp_path / name, *flags, data=data))
        return made[-1].start()

    yield make
    for member in made:
        member.close()
        if member.service.running:
            member.service.kill()


def test_what_one_publishes_drafts_at_the_other(members):
    first, second = members("first"), members("second")
    (text,) = outputs(1, 1)
    assert not second.proposes(text)
    first.publish(text)
    eventually(lambda: second.proposes(text))
