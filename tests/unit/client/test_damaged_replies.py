"""A service that answers what cannot be right: it costs the tree, not the worker."""

import logging
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from datastore_service.client import metrics, open_datastore
from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import GrpcDatastore
from datastore_service.engine.tree_check import Fault, find_faults
from datastore_service.protocol.tree import OTHER_TIER, DraftTree
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Query, Status
from proto_gen.specstore.v1 import drafting_pb2 as pb
from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingServicer, add_DraftingServicer_to_server
from sglang_patches.ledger.usage import source_name
from sglang_patches.verification.layout import lay_out, pack
from tests.waiting import eventually

VOCAB = 100
TEXT = np.array([1, 2, 3, 4] * 5, np.int32)
BUDGET = Budget(4, 3, 2)
SOUND = {"tokens": [5, 6, 7], "parents": [0, 1, 0], "probs": [0.5, 0.25, 0.125], "sources": b"\1\2\3"}
CHAIN = {"tokens": [5, 6, 7, 8], "parents": [0, 1, 2, 3], "probs": [0.5] * 4, "sources": b"\1" * 4}
STAR = {"tokens": [5, 6, 7], "parents": [0, 0, 0], "probs": [0.5] * 3, "sources": b"\1" * 3}
LARGE = {"tokens": [5, 6, 7, 8, 9], "parents": [0, 0, 1, 1, 2], "probs": [0.5] * 5, "sources": b"\1" * 5}


class Liar(DraftingServicer):
    """Answers `tree` for the first entry of each message, as for its only query, and a sound tree for the others. step: what it adds
    to the step's number."""

    tree, step = SOUND, 0

    def Draft(self, requests, context):  # noqa: N802 - gRPC's name
        next(requests)
        yield pb.DraftReply(tenants=True)
        for request in requests:
            yield self._answer(request)

    def _answer(self, request):
        trees = [self.tree if at == 0 else SOUND for at, entry in enumerate(request.entries)]
        trees += [self.tree] * len(request.queries.lengths)
        trees = [tree if drafted(request) else dict.fromkeys(tree, ()) for tree in trees]
        sizes, entries = [len(tree["tokens"]) for tree in trees], len(request.entries)
        reply = pb.DraftReply(
            step=request.step + self.step, statuses=[1] * entries, known=[20] * entries, nodes=sizes[:entries]
        )
        for name in ("tokens", "parents", "probs"):
            getattr(reply, name).extend(value for tree in trees for value in tree[name])
        reply.sources = b"".join(bytes(tree["sources"]) for tree in trees)
        if request.queries.lengths:
            reply.answers.counts.extend(request.queries.counts)
            reply.answers.nodes.extend(sizes[entries:])
        return reply


def drafted(request) -> bool:
    return any(entry.budget.nodes for entry in request.entries)


@pytest.fixture
def liar():
    yield Liar()


@pytest.fixture
def datastore(liar):
    server = grpc.server(ThreadPoolExecutor(4))
    add_DraftingServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    datastore = open_datastore(f"127.0.0.1:{port}", Namespace("m", "t"), VOCAB)
    datastore.post([Entry(name, tokens=TEXT, opening=Opening(prompt_length=20)) for name in "ab"])
    yield datastore
    datastore.close()
    server.stop(None).wait()


def ask(datastore):
    queries = (Query(np.array([1], np.int32), BUDGET),)
    entries = [Entry("a", 20, budget=BUDGET, queries=queries), Entry("b", 20, budget=Budget(8))]
    return datastore.step(entries, 60.0)


def damaged(fault: str) -> float:
    return metrics.DAMAGED_TREES.labels(fault)._value.get()


NAN = float("nan")


@pytest.mark.parametrize(
    ("tree", "fault"),
    [
        (SOUND | {"parents": [0, 2**31 - 1, 0]}, "parents"),
        (SOUND | {"parents": [0, 5000, 0]}, "parents"),
        (SOUND | {"parents": [2**32 - 1] * 3}, "parents"),
        (SOUND | {"parents": [1, 0, 0]}, "parents"),  # its own parent
        (SOUND | {"parents": [0, 3, 0]}, "parents"),  # a later node
        (SOUND | {"tokens": [5, VOCAB, 7]}, "tokens"),
        (SOUND | {"tokens": [5, 2**31, 7]}, "tokens"),
        (SOUND | {"tokens": [2**32 - 1, 6, 7]}, "tokens"),
        (SOUND | {"tokens": [5, 6, 5]}, "tokens"),  # siblings
        (SOUND | {"probs": [0.5, NAN, 0.125]}, "probs"),
        (SOUND | {"probs": [NAN] * 3}, "probs"),
        (SOUND | {"probs": [float("inf"), 0.5, 0.5]}, "probs"),
        (SOUND | {"probs": [-0.5, -0.5, 0.5]}, "probs"),
        (SOUND | {"probs": [0.5, 0.75, 0.125]}, "probs"),
        (CHAIN, "depth"),
        (STAR, "children"),
        (LARGE, "size"),
    ],
)
def test_a_tree_that_cannot_be_right_is_dropped_alone(datastore, liar, tree, fault, caplog):
    caplog.set_level(logging.WARNING)
    liar.tree, before = tree, damaged(fault)
    for _ in range(2):
        wrong, right = ask(datastore)
        assert (wrong.status, len(wrong.tree), len(wrong.trees[0])) == (Status.OK, 0, 0)
        assert right.tree.tokens.tolist() == SOUND["tokens"]
    assert damaged(fault) == before + 4
    assert caplog.text.count(f"a draft tree cannot be right ({fault})") == 1
    packed = pack([wrong.tree, right.tree], 5)
    assert lay_out(packed, np.zeros(2, np.int64), np.full(2, 20)).tokens.tolist()[5:] == [0, 5, 6, 7, 0]


@pytest.mark.parametrize("source", [0, 5, 7, OTHER_TIER, OTHER_TIER + 1, 255])
def test_a_tier_of_a_later_version_counts_as_another(datastore, liar, source):
    liar.tree = SOUND | {"sources": bytes([source, 2, 3])}
    wrong, _ = ask(datastore)
    assert wrong.tree.tokens.tolist() == SOUND["tokens"]
    assert list(map(source_name, wrong.tree.sources.tolist())) == ["other", "live", "session"]


@pytest.mark.parametrize("step", [1, 2**40, -1])
def test_a_reply_to_no_step_ends_the_stream(datastore, liar, step, caplog):
    """It must not count as an answer to steps that the service still owes."""
    caplog.set_level(logging.WARNING)
    ask(datastore)
    liar.step = step
    wrong, _ = ask(datastore)
    assert wrong.tree.tokens.tolist() == [1, 2, 3], "the local fallback's"
    eventually(lambda: "a reply to step" in caplog.text)


def test_bytes_that_are_no_reply_end_their_stream_at_the_service_too(caplog):
    """A stream that is left open takes one of the service's, and one of its threads."""
    caplog.set_level(logging.WARNING)
    open_streams = []

    def draft(requests, context):
        open_streams.append(context)
        context.add_callback(lambda: open_streams.remove(context))
        for number, _ in enumerate(requests):
            yield b"" if number == 0 else b"\xff"

    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"Draft": grpc.stream_stream_rpc_method_handler(draft, bytes, bytes)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("specstore.v1.Drafting", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stream = GrpcDatastore(f"127.0.0.1:{port}", Namespace("m", "t"))
    try:
        for _ in range(6):
            assert stream.wait_connected(20.0)
            with pytest.raises(DatastoreError):
                stream.step([Entry("a", tokens=TEXT)], 60.0)
        assert stream.wait_connected(20.0)
        eventually(lambda: len(open_streams) == 1)
    finally:
        stream.close()
        server.stop(None).wait()
    assert "connecting again" in caplog.text and "Traceback" not in caplog.text


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_tree_s_own_check(seed):
    """On random trees, most of which break an invariant of `check_integrity`."""
    draw, found = np.random.default_rng(seed), set()
    for _ in range(200):
        size, budget = int(draw.integers(0, 6)), draw.integers(1, 6, 3)
        tokens = draw.integers(-1 if draw.random() < 0.1 else 0, 12, size)
        parents = np.array([draw.integers(-1, max(node, 1)) for node in range(size)], np.int64)
        if size and draw.random() < 0.2:
            parents[draw.integers(size)] = draw.choice([-(2**31), -2, size, 5000, 2**31 - 1])
        probs = np.sort(draw.uniform(0, 1.02, size)).astype(np.float32)[::-1].copy()
        (fault,) = find_faults(tokens, parents, probs, np.array([size]), budget[None], 10)
        tree = DraftTree(tokens.astype(np.int32), parents.astype(np.int32), probs, np.ones(size, np.uint8))
        try:
            tree.check_integrity(*budget.tolist())
            sound = bool((tokens < 10).all())
        except ValueError:
            sound = False
        assert (fault == Fault.NONE) == sound, (tree, budget, Fault(fault))
        found.add(Fault(fault))
    assert {Fault.NONE, Fault.SIZE, Fault.PARENTS, Fault.TOKENS} <= found
