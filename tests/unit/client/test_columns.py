"""Entries travel as columns to a service that reads them, and to no other."""

import numpy as np
import pytest

from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from datastore_service.server import drafting
from proto_gen.specstore.v1 import drafting_pb2 as pb
from tests.unit.server.service import running

NAMESPACE = Namespace("m", "a" * 64)
TEXT = np.array([7, 1, 2, 3] * 4, np.int32)
SECONDS = 60.0


@pytest.fixture(params=["this version", "an earlier version"])
def exchanged(request, monkeypatch) -> tuple[bool, list[tuple[pb.DraftRequest, pb.DraftReply]]]:
    """Whether services read columns, and the messages of all streams."""
    current, messages, answer = request.param == "this version", [], drafting._Stream.answer

    def answered(self, request):
        reply = answer(self, request)
        if not current:
            reply.ClearField("columns")
        messages.append((request, reply))
        return reply

    monkeypatch.setattr(drafting._Stream, "answer", answered)
    return current, messages


def test_columns_if_the_service_reads_them(exchanged):
    columns, messages = exchanged
    with running() as service:
        datastore = GrpcDatastore(service.endpoint, NAMESPACE)
        assert datastore.wait_connected(SECONDS)
        opened = [Entry(name, tokens=TEXT, budget=Budget(4), opening=Opening()) for name in "ab"]
        first = datastore.step(opened, SECONDS)
        second = datastore.step([Entry("a", len(TEXT), TEXT[:4], budget=Budget(2)), Entry("?")], SECONDS)
        datastore.close()
    assert [reply.tree.tokens.tolist() for reply in first] == [[7, 1, 2, 3]] * 2
    assert [reply.status for reply in second] == [Status.OK, Status.UNKNOWN_SESSION]
    assert second[0].tree.tokens.tolist() == [7, 1]
    (greeting, _), *steps = messages
    assert not greeting.HasField("columns"), "the service has not said yet that it reads them"
    for request, reply in steps:
        assert (request.HasField("columns"), not request.entries) == (columns, columns)
        assert (bool(reply.packed_trees), not reply.tokens) == (columns, columns)
