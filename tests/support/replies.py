"""Reads a service's reply where the entries that it answers are not at hand."""

from __future__ import annotations

from datastore_service.client.wire import read_replies
from datastore_service.protocol.types import EMPTY_TOKENS, MAX_NODES, Budget, Entry, Query, Reply
from proto_gen.specstore.v1 import drafting_pb2 as pb

_MOST = Budget(MAX_NODES)


def read_sound(message: pb.DraftReply) -> list[Reply]:
    """Asserts that each tree is right and within what any budget may be."""
    counts = message.answers.counts if message.HasField("answers") else [0] * len(message.statuses)
    entries = [Entry("s", budget=_MOST, queries=(Query(EMPTY_TOKENS, _MOST),) * count) for count in counts]
    replies, faults = read_replies(message, entries)
    assert not faults
    return replies
