"""Entries and replies survive the way over the wire; what is out of bounds names its field."""

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.client import wire as client_wire
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import (
    NO_DRAFT,
    Budget,
    Entry,
    Namespace,
    Opening,
    Query,
    Rejected,
    Reply,
    Status,
)
from datastore_service.server import wire as server_wire
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.refusal import RefusalError
from proto_gen.specstore.v1 import drafting_pb2 as pb
from tests.support.columns import pack_trees, with_columns
from tests.support.replies import read_sound

FORMS = [lambda request: request, with_columns]  # of a request's entries
VOCAB = 1 << 31
LIMITS = ServiceLimits()

token_arrays = st.lists(st.integers(0, VOCAB - 1), max_size=8).map(lambda ids: np.array(ids, np.int32))
names = st.text(min_size=1, max_size=50)
entries = st.builds(
    Entry,
    session=names,
    start=st.integers(0, 1 << 30),
    tokens=token_arrays,
    rejected=st.lists(st.builds(Rejected, st.integers(0, 1 << 30), token_arrays), max_size=3).map(tuple),
    budget=st.builds(Budget, st.integers(0, 256), st.integers(1, 64), st.integers(1, 256)),
    opening=st.none()
    | st.builds(
        Opening,
        st.text(max_size=50),
        st.booleans(),
        st.integers(0, 1 << 30),
        epoch=st.integers(0, (1 << 64) - 1),
    ),
    closing=st.booleans(),
    withheld=st.booleans(),
    tenant=st.just("") | names,
    queries=st.lists(
        st.builds(
            Query,
            token_arrays,
            st.just(NO_DRAFT) | st.builds(Budget, st.integers(1, 256), st.integers(1, 64)),
        ),
        max_size=3,
    ).map(tuple),
)


@st.composite
def trees(draw) -> DraftTree:
    size = draw(st.integers(1, 10))
    probs = draw(st.lists(st.floats(0, 1, width=32), min_size=size, max_size=size))
    return DraftTree(
        np.array(
            draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size, unique=True)), np.int32
        ),
        np.array([draw(st.integers(-1, node - 1)) for node in range(size)], np.int32),
        np.array(sorted(probs, reverse=True), np.float32),
        np.array(draw(st.lists(st.integers(1, 4), min_size=size, max_size=size)), np.uint8),
    )


def plain(value):
    """Comparable: arrays as (dtype, list)."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


@given(st.lists(entries, max_size=4), st.booleans())
def test_entries(sent, columns):
    message = client_wire.request_message(7, sent, columns=columns)
    assert message.HasField("columns") is columns
    parsed = pb.DraftRequest.FromString(message.SerializeToString())
    received = server_wire.read_entries(parsed, VOCAB, LIMITS)
    for before, after in zip(sent, received, strict=True):
        if before.budget.nodes == 0:  # no draft is wanted: the other bounds do not travel
            assert after.budget.nodes == 0
            after = Entry(**{f: getattr(after, f) for f in Entry.__slots__} | {"budget": before.budget})
        assert plain(after) == plain(before)


@given(
    st.lists(
        st.builds(
            Reply,
            st.sampled_from(Status),
            st.integers(0, 1 << 31),
            st.just(EMPTY_TREE) | trees(),
            st.lists(st.just(EMPTY_TREE) | trees(), max_size=3).map(tuple),
        )
    ),
    st.booleans(),
)
def test_replies(sent, packed):
    message = server_wire.reply_message(9, sent, packed)
    parsed = pb.DraftReply.FromString(message.SerializeToString())
    assert parsed.step == 9
    assert plain(read_sound(parsed)) == plain(sent)


def test_namespace():
    namespace = Namespace("model", "f" * 64, "tenant")
    assert server_wire.read_namespace(client_wire.namespace_message(namespace), LIMITS) == namespace


@pytest.mark.parametrize("form", FORMS)
def test_queries_of_a_refused_entry_are_left_out(form):
    message = asking(counts=[1, 1])
    message.entries[0].session = ""
    message = form(message)
    refusal, entry = server_wire.read_entries(message, 100, LIMITS)
    assert refusal == "session: empty"
    assert [query.tokens.tolist() for query in entry.queries] == [[2, 3]]


def filled(**fields) -> pb.DraftRequest:
    return pb.DraftRequest(entries=[pb.Entry(session="fine"), pb.Entry(**{"session": "s"} | fields)])


def asking(**columns) -> pb.DraftRequest:
    """Two queries of the second entry, with one and two tokens."""
    whole = {
        "counts": [0, 2], "tokens": [1, 2, 3], "lengths": [1, 2], "nodes": [1, 1], "depths": [1, 1], "children": [1, 1],
    }  # fmt: skip
    return pb.DraftRequest(entries=[{"session": "r"}, {"session": "s"}], queries=whole | columns)


ENTRY_COLUMNS = ("starts", "counts", "nodes", "depths", "children")


def in_columns(**columns) -> pb.DraftRequest:
    """Two sessions, the second with two tokens."""
    whole = {
        "sessions": ["r", "s"], "starts": [0, 5], "tokens": [1, 2, 3], "counts": [1, 2], "nodes": [1, 1], "depths": [1, 1],
        "children": [1, 1],
    }  # fmt: skip
    return pb.DraftRequest(columns=whole | columns)


@pytest.mark.parametrize(
    ("request_message", "message"),
    [
        (filled(session=""), "session: empty"),
        (filled(session="é" * 129), "session: 258 bytes exceeds 256"),
        (filled(tokens=[1, 100]), "tokens[1]: 100 is not below the vocabulary's 100"),
        (filled(tokens=[2**32 - 1]), "tokens[0]: 4294967295 is not below"),
        (filled(start=2**32 - 1), "start: 4294967295 start and tokens exceeds 2147483647"),
        (filled(budget={"nodes": 100000, "depth": 1, "children": 1}), "budget.nodes: 100000 exceeds 256"),
        (filled(budget={"nodes": 1, "depth": 65, "children": 1}), "budget.depth: 65 exceeds 64"),
        (filled(budget={"nodes": 1, "depth": 1, "children": 257}), "budget.children: 257 exceeds 256"),
        (filled(budget={"depth": 65}), "budget.depth: 65 exceeds 64"),
        (filled(budget={"nodes": 5}), "budget: 5 nodes need a depth and children of at least 1"),
        (filled(opening={"conversation": "c" * 257}), "opening.conversation: 257 bytes exceeds 256"),
        (filled(opening={"prompt_length": 2**31}), "opening.prompt_length: 2147483648 exceeds"),
        (filled(rejected=[{}] * 257), "rejected: 257 positions in one entry exceeds 256"),
        (filled(rejected=[{}, {"position": 2**31}]), "rejected[1].position: 2147483648 exceeds"),
        (filled(rejected=[{"tokens": [3, 200]}]), "rejected[0].tokens[1]: 200 is not below"),
        (filled(tenant="x" * 257), "tenant: 257 bytes exceeds 256"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_entry_is_refused_by_itself_naming_field_and_limit(form, request_message, message):
    fine, refusal = server_wire.read_entries(form(request_message), 100, LIMITS)
    assert fine.session == "fine" and refusal.startswith(message)


@pytest.mark.parametrize(
    ("request_message", "message"),
    [
        (asking(tokens=[1, 2, 100]), "queries.tokens[2]: 100 is not below the vocabulary's 100"),
        (asking(tokens=[1] * 258, lengths=[1, 257]), "queries.lengths[1]: 257 exceeds 256"),
        (asking(nodes=[1, 257]), "queries.nodes[1]: 257 exceeds 256"),
        (asking(depths=[65, 1]), "queries.depths[0]: 65 exceeds 64"),
        (asking(children=[1, 0]), "queries.nodes[1]: 1 need a depth and children of at least 1"),
        (asking(lengths=[0] * 4097), "queries.lengths: 4097 queries in one message exceeds 4096"),
        (asking(counts=[2]), "queries.counts: 1 for 2 entries"),
        (asking(counts=[2, 1]), "queries.counts: 3 for 2 queries, in all"),
        (asking(tokens=[1]), "queries.tokens: 1 for 3 in lengths, in all"),
        (asking(nodes=[1]), "queries.nodes: 1 for 2 queries"),
        (asking(depths=[]), "queries.depths: 0 for 2 queries"),
        (pb.DraftRequest(entries=[{"session": "s"}] * 1025), "entries: 1025 entries in one message exceeds 1024"),
        (in_columns(sessions=["s"] * 1025), "columns.sessions: 1025 entries in one message exceeds 1024"),
        *[(in_columns(**{name: [1]}), f"columns.{name}: 1 for 2 sessions") for name in ENTRY_COLUMNS],
        (in_columns(tenants=["t"]), "columns.tenants: 1 for 2 sessions"),
        (in_columns(tokens=[1, 2, 3, 4]), "columns.tokens: 4 for 3 in counts, in all"),
        (in_columns(more={2: {}}), "columns.more: 2 is not below the 2 sessions"),
        (pb.DraftRequest(entries=[{"session": "s"}], columns={}), "columns: the message has entries besides"),
    ],
)  # fmt: skip
def test_bad_input_names_field_and_limit(request_message, message):
    with pytest.raises(RefusalError) as refusal:
        server_wire.read_entries(request_message, 100, LIMITS)
    assert str(refusal.value).startswith(message)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_namespace_bounds():
    with pytest.raises(RefusalError, match="namespace.tenant: 257 bytes exceeds 256"):
        server_wire.read_namespace(pb.Namespace(tokenizer="t", tenant="x" * 257), LIMITS)
    with pytest.raises(RefusalError, match="namespace.tokenizer: missing") as refusal:
        server_wire.read_namespace(pb.Namespace(model="m"), LIMITS)
    assert refusal.value.code is grpc.StatusCode.FAILED_PRECONDITION


WHOLE = {
    "statuses": [1, 2], "known": [5, 0], "nodes": [2, 0], "tokens": [1, 2], "parents": [0, 1], "probs": [0.5, 0.25],
    "sources": b"\1\1",
}  # fmt: skip
ASKED = [Entry("a", budget=Budget(2)), Entry("b", budget=Budget(2))]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"statuses": [1]}, "statuses: 1 for 2 entries"),
        ({"known": [5]}, "known: 1 for 2 entries"),
        ({"nodes": [2, 1]}, "tokens: 2 for 3 nodes in all"),
        ({"nodes": [2, 2**32 - 1]}, "tokens: 2 for 4294967297 nodes in all"),
        ({"parents": [0]}, "parents: 1 for 2 nodes in all"),
        ({"sources": b""}, "sources: 0 for 2 nodes in all"),
        (
            {"nodes": [5, 0], "tokens": [1] * 5, "parents": [0] * 5, "probs": [0.5] * 5, "sources": b"\1" * 5},
            "nodes: 5 in all for budgets of 4",
        ),
        ({"answers": {"counts": [1, 0]}}, "answers: counts of 2 entries, in all 1, and 0 trees for 0 queries of 2"),
        ({"answers": {"counts": [0], "nodes": [0]}}, "answers: counts of 1 entries, in all 0, and 1 trees for 0 queries of 2"),
        ({"answers": {"counts": [0, 0], "nodes": [1]}}, "answers: counts of 2 entries, in all 0, and 1 trees"),
    ],
)  # fmt: skip
def test_replies_that_cannot_be_read(changes, message):
    replies, faults = client_wire.read_replies(pb.DraftReply(**WHOLE), ASKED)
    assert [len(reply.tree) for reply in replies] == [2, 0] and not faults
    with pytest.raises(ValueError, match=message):
        client_wire.read_replies(pb.DraftReply(**WHOLE | changes), ASKED)


@pytest.mark.parametrize("size", [1, 25, 27, 39])
def test_packed_trees_of_another_length(size):
    message = pb.DraftReply(**WHOLE)
    pack_trees(message)
    assert len(message.packed_trees) == 26
    message.packed_trees = (message.packed_trees * 2)[:size]
    with pytest.raises(ValueError, match=f"packed_trees: {size} bytes for 2 nodes in all"):
        client_wire.read_replies(message, ASKED)


def test_a_status_of_a_later_version_refuses_its_entry_alone():
    replies, _ = client_wire.read_replies(pb.DraftReply(**WHOLE | {"statuses": [1, 77]}), ASKED)
    assert [reply.status for reply in replies] == [Status.OK, Status.OVER_BUDGET]


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults():
    """A newer worker's message: field 100 of the entry and field 50 of the message are not ours."""
    newer = pb.DraftRequest(step=3, entries=[{"session": "s", "tokens": [4, 5]}])
    entry = newer.entries[0].SerializeToString() + b"\xa2\x06\x03abc"
    raw = b"\x08\x03" + b"\x1a" + bytes([len(entry)]) + entry + b"\x90\x03\x2a"
    (received,) = server_wire.read_entries(pb.DraftRequest.FromString(raw), 100, LIMITS)
    assert (received.session, received.tokens.tolist(), received.opening) == ("s", [4, 5], None)
