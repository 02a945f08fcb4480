"""Services that share their outputs, as tests of sharing start and ask them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from datastore_service.client.channel import open_channel
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Reply, Status
from proto_gen.specstore.v1 import admin_pb2, drafting_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from tests.integration.datastore.conftest import VOCAB
from tests.support.servers.datastore import DatastoreService
from tests.support.servers.share import ShareServer

NAMESPACE = Namespace("m", "ab" * 32)
LENGTH = 40
KNOWN = 16  # tokens of an output after which its next are asked for
ASKED = 8
BATCH = 64  # outputs that are asked for in one message
ANSWER_SECONDS = 60.0


class Member:
    """A service that shares, and a client of it for each namespace."""

    def __init__(self, share: ShareServer, folder: Path, *flags: object, data: bool = True) -> None:
        folder.mkdir(exist_ok=True)
        self.data = folder / "data"
        self.data.mkdir(exist_ok=True)
        kept = ("--data", self.data) if data else ()
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
        """Returns once the output is acknowledged. Raises DatastoreError."""
        entry = Entry("s", tokens=output, opening=Opening(user=user), closing=True)
        (reply,) = self.client(namespace).step([entry], ANSWER_SECONDS)
        assert reply.status is Status.OK

    def proposes(self, output: np.ndarray, namespace: Namespace = NAMESPACE) -> bool:
        return self.held([output], namespace)[0]

    def held(self, outputs: Sequence[np.ndarray], namespace: Namespace = NAMESPACE) -> list[bool]:
        """Of each output whether it is drafted from the live tier."""
        opening, found = Opening(publish=False, prompt_length=KNOWN), []
        for first in range(0, len(outputs), BATCH):
            asked = outputs[first : first + BATCH]
            entries = [
                Entry(
                    f"q{i}",
                    tokens=each[:KNOWN],
                    budget=Budget(ASKED, ASKED, 1),
                    opening=opening,
                    closing=True,
                )
                for i, each in enumerate(asked)
            ]
            replies = self.client(namespace).step(entries, ANSWER_SECONDS)
            found += [_continues(each, reply) for each, reply in zip(asked, replies, strict=True)]
        return found

    def tokens(self) -> int:
        """Of the live tier: LENGTH for each output that it has."""
        name = drafting_pb2.Namespace(model=NAMESPACE.model, tokenizer=NAMESPACE.tokenizer)
        with open_channel(self.service.endpoint) as channel:
            return AdminStub(channel).Compact(admin_pb2.CompactRequest(namespace=name)).tokens

    def client(self, namespace: Namespace = NAMESPACE) -> GrpcDatastore:
        if namespace not in self._clients:
            client = GrpcDatastore(self.service.endpoint, namespace)
            assert client.wait_connected(ANSWER_SECONDS)
            self._clients[namespace] = client
        return self._clients[namespace]


def _continues(output: np.ndarray, reply: Reply) -> bool:
    expected = output[KNOWN : KNOWN + ASKED].tolist()
    return reply.tree.tokens.tolist() == expected and set(reply.tree.sources) == {Tier.LIVE}


def outputs(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (count, LENGTH), dtype=np.int32)
