"""Streams on a real server, read and written by engines in this process."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from datastore_service.engine.engine import Engine
from datastore_service.protocol.types import Entry, Namespace, Opening
from datastore_service.server.namespaces import HostedNamespace
from datastore_service.server.sharing import lease
from datastore_service.server.sharing.forgetting import Forgets
from datastore_service.server.sharing.keys import keys_of
from datastore_service.server.sharing.lease import Lease, NameTakenError
from datastore_service.server.sharing.metrics import ShareMetrics
from datastore_service.server.sharing.stream import Self, SharedStream
from datastore_service.storage.share_file import ShareState
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
        forgets = Forgets(ShareState(), threading.Lock(), lambda: None)
        metrics = ShareMetrics(CollectorRegistry())
        self.stream = SharedStream(hosted, Self(name * 16, 0), {}, forgets, lambda: None, metrics)

    def publish(self, first: int) -> None:
        text = np.arange(first, first + 10, dtype=np.int32)
        self.engine.step([Entry("s", tokens=text, opening=Opening(), closing=True)])

    def exchange(self, client) -> None:
        while self.stream.receive(client) or self.stream.send(client):
            pass


class Clock:
    """In place of the time that a lease reads."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(lease, "time", made)
    return made


def test_a_lease_that_nobody_renews_is_over(client, clock):
    killed, next_one = Lease("key", "name"), Lease("key", "name")
    assert killed.held(client) and not next_one.held(client)
    assert 0 < client.pttl("key") <= 1000 * lease.LEASE_SECONDS
    client.delete("key")  # as the server does then
    assert next_one.held(client)
    next_one.end(client)
    assert killed.held(client)  # for it has not looked since


def test_two_processes_of_one_name_are_told_apart(client, clock):
    """The second is refused once the first must have renewed its lease, and again while it does. Of the two the one holds it that was not
    away."""
    first, copy = Lease("key", "name"), Lease("key", "name")
    assert first.held(client)
    for _ in range(lease.LEASE_SECONDS):
        assert not copy.held(client)
        clock.now += 1.01
        client.persist("key")  # the server's own clock is not the test's
        assert first.held(client) and client.ttl("key") > 0
    for _ in range(2):
        with pytest.raises(NameTakenError, match="service name.* remove share.json from the copy"):
            copy.held(client)
    copy.end(client)
    assert first.held(client)
    first.end(client)
    assert copy.held(client)
    clock.now += 1.01
    assert not first.held(client) and copy.held(client)


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
