"""Streams on a real server, read and written by engines in this process."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.server.namespaces import HostedNamespace
from datastore_service.server.sharing.keys import keys_of
from datastore_service.server.sharing.metrics import ShareMetrics
from datastore_service.server.sharing.stream import Self, SharedStream
from tests.support.servers.share import ShareServer

VOCAB = 1000
NAMESPACE = Namespace("m", "ab" * 32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ShareServer(tmp_path_factory.mktemp("share")) as started:
        yield started


@pytest.fixture
def client(server):
    server.client.flushall()
    return server.client


class Service:
    """A namespace of a service of this name, and its stream."""

    def __init__(self, name: str) -> None:
        self.engine = Engine(VOCAB)
        hosted = HostedNamespace(NAMESPACE, self.engine, prior=False, stored=False, grace=0.0)
        self.stream = SharedStream(hosted, Self(name * 16, 0), {}, ShareMetrics(CollectorRegistry()))

    def publish(self, first: int) -> None:
        text = np.arange(first, first + 10, dtype=np.int32)
        self.engine.step([Entry("s", tokens=text, opening=Opening(), closing=True)])

    def exchange(self, client) -> None:
        while self.stream.receive(client) or self.stream.send(client):
            pass


def test_what_the_server_loses_before_an_output_is_added_is_told_again(client, monkeypatch):
    """It was away between two commands of one round, and the client has reconnected by itself."""
    service = Service("1")
    service.stream.resume(client)
    service.publish(1)
    service.exchange(client)
    service.publish(20)
    monkeypatch.setattr(service.engine, "sync", client.flushall)  # called in the middle of it
    service.stream.send(client)
    monkeypatch.undo()
    service.exchange(client)
    assert client.xlen(keys_of(NAMESPACE).texts) == 2
