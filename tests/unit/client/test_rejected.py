"""Refused tokens travel to a namespace that keeps them, and to no other."""

import numpy as np
import pytest

from datastore_service.client import open_datastore
from datastore_service.client.remote import GrpcDatastore
from datastore_service.engine.engine import Limits
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Entry, Namespace, Opening, Rejected
from datastore_service.server import drafting
from tests.unit.server.service import VOCAB, running
from tests.waiting import eventually

NAMESPACE = Namespace("m", "a" * 64)
TEXT = np.array([7, 1, 2, 3], np.int32)
REFUSED = (Rejected(3, np.array([5], np.int32)),)
SECONDS = 60.0


@pytest.fixture
def received(monkeypatch) -> list[Entry | str]:
    """What services read."""
    received, read = [], drafting.wire.read_entries

    def keep(*arguments):
        entries = read(*arguments)
        received.extend(entries)
        return entries

    monkeypatch.setattr(drafting.wire, "read_entries", keep)
    return received


def tell(datastore) -> None:
    datastore.step([Entry("s", tokens=TEXT, rejected=REFUSED, opening=Opening())], SECONDS)


def kept(service) -> int:
    (hosted,) = service.namespaces
    return hosted.engine.stats().tiers[Tier.REJECTED].tokens


@pytest.mark.parametrize(("limit", "travels"), [(0, False), (4, True)])
@pytest.mark.parametrize("resilient", [False, True])
def test_a_service_says_once_whether_it_keeps_them(received, limit, travels, resilient, monkeypatch):
    monkeypatch.setattr("datastore_service.client.GREETING_SECONDS", SECONDS)
    with running(engine_limits=Limits(refusals=limit)) as service:
        if resilient:
            datastore = open_datastore(service.endpoint, NAMESPACE, VOCAB)
        else:
            datastore = GrpcDatastore(service.endpoint, NAMESPACE)
            assert datastore.wait_connected(SECONDS)
        try:
            assert datastore.wants_rejected is travels
            tell(datastore)
            assert [len(entry.rejected) for entry in received] == [int(travels)]
            assert kept(service) == int(travels)
        finally:
            datastore.close()


def test_a_service_that_comes_back_with_the_tier_gets_them(tmp_path):
    endpoint = f"unix:{tmp_path}/s.sock"
    datastore = GrpcDatastore(endpoint, NAMESPACE)
    assert datastore.wants_rejected, "an earlier service does not say, and may keep them"
    with running(listen=endpoint):
        assert datastore.wait_connected(SECONDS)
        assert not datastore.wants_rejected
    eventually(lambda: datastore.disconnect_reason)
    with running(listen=endpoint, engine_limits=Limits(refusals=4)) as service:
        try:
            assert datastore.wait_connected(SECONDS)
            assert datastore.wants_rejected
            tell(datastore)
            assert kept(service) == 1
        finally:
            datastore.close()


def test_the_embedded_datastore_keeps_none():
    datastore = open_datastore("embedded", NAMESPACE, VOCAB)
    assert not datastore.wants_rejected
    tell(datastore)
