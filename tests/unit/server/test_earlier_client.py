"""A worker of an earlier version against this service: its own messages, as its schema makes and reads them.

`earlier/drafting.proto` is the contract of commit 271149e, before queries, and is not to be changed."""

from __future__ import annotations

import queue
from itertools import accumulate
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from datastore_service.client.remote import GrpcDatastore
from datastore_service.engine.limits import Limits
from datastore_service.engine.segment import build_segment
from datastore_service.engine.workspaces import LEAST_TOKENS
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Query
from datastore_service.server.prior_file import read_priors
from datastore_service.storage.manifest import Manifest, write_manifest
from datastore_service.storage.segment_file import SUFFIX, write_segment
from tests.unit.server.service import VOCAB, running

protoc = pytest.importorskip("grpc_tools.protoc")

EARLIER = Path(__file__).parent / "earlier"
NAMESPACE = {"model": "m", "tokenizer": "t"}
TOKENIZER = "a" * 64  # of a prior
TEXT = [1, 2, 3, 4] * 10
BUDGET = {"nodes": 8, "depth": 8, "children": 4}
OK, UNKNOWN_SESSION, GAP = 1, 2, 3


@pytest.fixture(scope="module")
def schema(tmp_path_factory) -> dict[str, type[Message]]:
    """The earlier messages by name, in a pool of their own."""
    target = tmp_path_factory.mktemp("schema") / "drafting.binpb"
    assert protoc.main(["protoc", f"-I{EARLIER}", f"--descriptor_set_out={target}", "drafting.proto"]) == 0
    pool = descriptor_pool.DescriptorPool()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"specstore.v1.{name}"))
        for name in names
    }


class EarlierWorker:
    """Its half of a Draft stream."""

    def __init__(self, endpoint: str, schema: dict[str, type[Message]]) -> None:
        self._request = schema["DraftRequest"]
        self._outbound: queue.SimpleQueue = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(endpoint)
        draft = self._channel.stream_stream(
            "/specstore.v1.Drafting/Draft",
            request_serializer=self._request.SerializeToString,
            response_deserializer=schema["DraftReply"].FromString,
        )
        self._call = draft(iter(self._outbound.get, None))
        self._step = 0

    def ask(self, *entries: dict, namespace: dict | None = None) -> list[tuple[int, int, list[int]]]:
        """Status, known tokens and drafted tokens of each entry; the checks are the earlier client's."""
        self._step += 1
        self._outbound.put(self._request(step=self._step, namespace=namespace, entries=entries))
        reply = next(self._call)
        assert reply.step == self._step
        assert len(reply.statuses) == len(reply.known) == len(reply.nodes) == len(entries)
        nodes = sum(reply.nodes)
        assert len(reply.tokens) == len(reply.parents) == len(reply.probs) == len(reply.sources) == nodes
        assert all(source in (1, 2, 3, 4) for source in reply.sources)
        ends = list(accumulate(reply.nodes))
        trees = [list(reply.tokens[end - size : end]) for size, end in zip(reply.nodes, ends, strict=True)]
        return list(zip(reply.statuses, reply.known, trees, strict=True))

    def close(self) -> None:
        self._outbound.put(None)
        self._channel.close()


def test_the_schema_is_the_earlier_one(schema):
    assert "Queries" not in schema
    assert {"queries", "answers"}.isdisjoint(
        field.name for name in schema for field in schema[name].DESCRIPTOR.fields
    )


@pytest.mark.parametrize("refusals", [0, 16], ids=["without the rejected tier", "with it"])
def test_a_whole_session_of_an_earlier_worker(schema, refusals):
    """Greeting, prompt, drafts, refused siblings, repetition, gap, closing; and what it published is found."""
    with running(engine_limits=Limits(refusals=refusals)) as service:
        worker = EarlierWorker(service.endpoint, schema)
        try:
            assert worker.ask(namespace=NAMESPACE) == []
            opening = {"prompt_length": 40}
            assert worker.ask({"session": "s", "tokens": TEXT, "opening": opening}) == [(OK, 40, [])]
            step = {
                "session": "s", "start": 40, "tokens": [1, 2], "rejected": [{"position": 40, "tokens": [7, 8]}],
                "budget": BUDGET,
            }  # fmt: skip
            for _ in range(2):
                (drafted,) = worker.ask(step)
                assert drafted == (OK, 42, [3, 4, 1, 2, 3, 4, 1, 2])
            (hosted,) = service.namespaces
            assert len(hosted.engine._sessions._open["s"].index.refused) == (2 if refusals else 0)
            replies = worker.ask(
                {"session": "s", "start": 50, "tokens": [1]},
                {"session": "x", "tokens": [1]},
                {"session": "s", "start": 42, "budget": {"nodes": 2, "depth": 1, "children": 1}},
            )
            assert replies == [(GAP, 42, []), (UNKNOWN_SESSION, 0, []), (OK, 42, [3])]
            worker.ask({"session": "s", "start": 42, "tokens": [90, 91, 92], "closing": True})
            (found,) = worker.ask(
                {"session": "t", "tokens": [1, 2, 90], "opening": {"forbid_publish": True}, "budget": BUDGET}
            )
            assert found[2][:2] == [91, 92]
        finally:
            worker.close()


def test_earlier_and_present_workers_share_a_service_and_a_session(schema):
    with running() as service:
        earlier = EarlierWorker(service.endpoint, schema)
        present = GrpcDatastore(service.endpoint, Namespace("m", "t"))
        try:
            assert present.wait_connected(60)
            earlier.ask(namespace=NAMESPACE)
            earlier.ask({"session": "s", "tokens": TEXT, "opening": {}})
            query = Query(np.array([1, 2], np.int32), Budget(2))
            (reply,) = present.step([Entry("s", 40, queries=(query,))], 60.0)
            assert reply.trees[0].tokens.tolist() == [3, 4]
            assert earlier.ask({"session": "s", "start": 40, "budget": BUDGET})[0][2][:2] == [1, 2]
        finally:
            present.close()
            earlier.close()


def test_what_later_workers_choose_does_not_disturb_an_earlier_one(schema, tmp_path):
    """It goes on with a session whose opening names a prior and a workspace. It knows four kinds of sources."""
    write_segment(
        tmp_path / f"0{SUFFIX}", build_segment([np.array([7, 8, 9, 50, 51], np.int32)], VOCAB), TOKENIZER
    )
    write_manifest(tmp_path, Manifest(TOKENIZER, VOCAB, (f"0{SUFFIX}",)))
    (tmp_path / "priors.toml").write_text('[priors.code]\ndirectory = "."\ntenants = ["*"]')
    limits, named = Limits(workspace_tokens=LEAST_TOKENS), read_priors(tmp_path / "priors.toml")
    with running(engine_limits=limits, named=named) as service:
        earlier, present = (
            EarlierWorker(service.endpoint, schema),
            GrpcDatastore(service.endpoint, Namespace("m", TOKENIZER)),
        )
        try:
            assert present.wait_connected(60)
            chosen = Opening(priors=("code",), workspace="project", publish=False)
            read = np.array([*range(100, 180), 7, 8, 9, 60, 61], np.int32)
            present.step([Entry("reader", 0, read, opening=chosen, closing=True)], 60.0)
            present.step([Entry("s", 0, np.array([7, 8, 9], np.int32), opening=chosen)], 60.0)
            earlier.ask(namespace=NAMESPACE | {"tokenizer": TOKENIZER})
            ((status, known, tokens),) = earlier.ask({"session": "s", "start": 3, "budget": BUDGET})
            assert (status, known, set(tokens)) == (OK, 3, {50, 51, 60, 61})
            assert earlier.ask({"session": "s", "start": 3, "tokens": [50], "closing": True})[0][:2] == (
                OK,
                4,
            )
        finally:
            present.close()
            earlier.close()
