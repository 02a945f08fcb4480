"""A real service process under every kind of message. After each it must answer an untouched session as ever.

SPECSTORE_FUZZ=20 tries twenty times as many.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from datastore_service.client import wire as client_wire
from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.protocol.types import Budget, Entry, Opening, Query, Reply, step_without_refused
from datastore_service.server import wire as server_wire
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.refusal import RefusalError
from proto_gen.specstore.v1 import admin_pb2, drafting_pb2
from proto_gen.specstore.v1.admin_pb2_grpc import AdminStub
from proto_gen.specstore.v1.drafting_pb2_grpc import DraftingStub
from tests.integration.datastore.conftest import VOCAB, write_tokenizer
from tests.integration.datastore.messages import broken, messages, parsed
from tests.support.columns import with_columns
from tests.support.replies import read_sound
from tests.support.servers.datastore import DatastoreService
from tests.waiting import eventually

SECONDS = 60.0  # until nothing is left of a client that is gone
EFFORT = int(os.environ.get("SPECSTORE_FUZZ", "1"))
TRIES = settings(
    max_examples=60 * EFFORT, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)  # fmt: skip

DEADLINE = 60.0  # of a call; one that takes longer hangs
GRACE = 0.2
SESSIONS = 64
LIMITS = ServiceLimits()
TOKEN = "secret"
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)
FINGERPRINT = "f" * 64
REFUSALS = {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "NOT_FOUND", "ALREADY_EXISTS"}
MOST_DETAILS = 4096  # characters; a refusal says what it means in one line
FIELD = re.compile(r"([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*)[: ]")
UNPARSABLE = re.compile(r"request: \d+ bytes that are no message of [\w./]+")
TOO_LARGE = re.compile(r"received message larger than max \(\d+ vs\. \d+\)", re.IGNORECASE)
OVER_QUOTA = re.compile(r"([a-z_]+): \d+ exceeds \d+, the quota of tenant .+")

METHODS = [
    method
    for file in (drafting_pb2, admin_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ADMIN_METHODS = [method for method in METHODS if method.containing_service.name == "Admin"]
QUOTAS = {*admin_pb2.SetQuotaRequest.DESCRIPTOR.fields_by_name} - {"tenant"}
DRAFT = next(method for method in METHODS if method.name == "Draft")


def name_of(method: MethodDescriptor) -> str:
    return method.name


def namespace(tenant: str) -> drafting_pb2.Namespace:
    return drafting_pb2.Namespace(model="m", tokenizer=FINGERPRINT, tenant=tenant)


FILES = (
    "ids.jsonl", "too_large.jsonl", "damaged.jsonl", "text.txt", "damaged.parquet", "damaged.npy", "ids.npy", "reals.npy",
    "folder.jsonl", "outside.jsonl", "none.npy",
)  # fmt: skip
NAMESPACES = [namespace(tenant) for tenant in ("a", "b", "c")]
ORDINARY = {
    "Namespace": st.sampled_from(NAMESPACES),
    "tokens": st.sampled_from((1, 2, 3, VOCAB - 1)),
    "nodes": st.integers(0, 16),
    "depth": st.integers(1, 8),
    "children": st.integers(1, 8),
    "file": st.sampled_from(FILES),
    "field": st.sampled_from(("", "ids", "text")),
    "tokenizer": st.sampled_from(("", "tokenizer.json", ".", "text.txt")),
}


# Calls


@dataclass(frozen=True)
class Outcome:
    """replies: serialized. code: a status code's name."""

    replies: list[bytes]
    code: str
    details: str


def call(
    endpoint: str,
    method: MethodDescriptor,
    payloads: Sequence[bytes],
    metadata: Sequence[tuple[str, str]] = AUTHORIZED,
    cancelled_after: int | None = None,
) -> Outcome:
    """Sends the payloads as they are and waits for the end, or cancels after so many replies."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    replies: list[bytes] = []
    with grpc.insecure_channel(endpoint, options=UNBOUNDED) as channel:
        try:
            if method.server_streaming:
                stream = channel.stream_stream if method.client_streaming else channel.unary_stream
                given = iter(payloads) if method.client_streaming else payloads[0]
                answers = stream(path)(given, timeout=DEADLINE, metadata=metadata)
                if cancelled_after == 0:
                    answers.cancel()
                for reply in answers:
                    replies.append(reply)
                    if len(replies) == cancelled_after:
                        answers.cancel()
            elif method.client_streaming:
                replies.append(
                    channel.stream_unary(path)(iter(payloads), timeout=DEADLINE, metadata=metadata)
                )
            else:
                replies.append(channel.unary_unary(path)(payloads[0], timeout=DEADLINE, metadata=metadata))
        except grpc.RpcError as error:
            return Outcome(replies, error.code().name, error.details() or "")
    return Outcome(replies, "OK", "")


UNBOUNDED = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


def check(method: MethodDescriptor, payloads: Sequence[bytes], outcome: Outcome) -> None:
    """A normal reply, or a status code with details that begin with a field of the message."""
    requests = [parsed(method.input_type, payload) for payload in payloads]
    if outcome.code == "OK":
        assert None not in requests, "bytes that are no message were answered"
        check_replies(method, requests, outcome.replies)
    elif UNPARSABLE.fullmatch(outcome.details):
        assert None in requests and outcome.code == "INVALID_ARGUMENT", outcome
    else:
        check_refusal(method.input_type, outcome)


def check_refusal(request: Descriptor, outcome: Outcome) -> None:
    assert outcome.code in REFUSALS, outcome
    assert len(outcome.details) <= MOST_DETAILS and outcome.details.isprintable(), outcome
    if outcome.code == "RESOURCE_EXHAUSTED":
        if TOO_LARGE.search(outcome.details):
            return
        if over := OVER_QUOTA.fullmatch(outcome.details):
            assert over[1] in QUOTAS, outcome
            return
    named = FIELD.match(outcome.details)
    assert named and has_field(request, named[1]), outcome
    assert outcome.details[named.end() :].strip(), outcome


def has_field(request: Descriptor, path: str) -> bool:
    """Whether a path such as `entries[2].budget.nodes` leads to a field (or oneof) of the message."""
    kind: Descriptor | None = request
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        if kind is None or (name not in kind.fields_by_name and name not in kind.oneofs_by_name):
            return False
        field = kind.fields_by_name.get(name)
        kind = field.message_type if field else None
    return True


def check_replies(method: MethodDescriptor, requests: Sequence[Message], replies: Sequence[bytes]) -> None:
    answers = [parsed(method.output_type, reply) for reply in replies]
    assert None not in answers
    if method is not DRAFT:
        assert method.server_streaming or len(answers) == 1
        return
    assert len(answers) == len(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.step == request.step
        read = read_sound(answer)
        for entry, reply in zip(request.entries, read, strict=True):
            if reply.refusal:
                named = FIELD.match(reply.refusal)
                assert named and has_field(entry.DESCRIPTOR, named[1]), reply
            budget = entry.budget
            reply.tree.check_integrity(budget.nodes, budget.depth, budget.children)
            assert (reply.tree.tokens < VOCAB).all()


# The service, and what must be as it was


class Control:
    """A stream of its own, and an engine in this process that is told the same and answers the same."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint)
        self._outbound: queue.SimpleQueue = queue.SimpleQueue()
        requests = iter(self._outbound.get, None)
        self._call = DraftingStub(self._channel).Draft(requests)
        self._admin = AdminStub(self._channel)
        self._engine = Engine(VOCAB)
        self._rng = np.random.default_rng(0)
        self._checks, self._steps = itertools.count(), itertools.count()
        self._namespace: drafting_pb2.Namespace | None = namespace("control")
        self.check()

    def check(self) -> None:
        """A session that repeats itself and what earlier ones wrote."""
        number = next(self._checks)
        if number % 500 == 499:  # a fresh text that fills would be sealed at another time here than there
            request = admin_pb2.FlushRequest(namespace=namespace("control"), all=True)
            self._admin.Flush(request, timeout=DEADLINE, metadata=AUTHORIZED)
            self._engine.flush()
        text = self._rng.integers(0, 4, 30, dtype=np.int32)
        name = f"control {number}"
        self._step(Entry(name, 0, text[:10], opening=Opening(prompt_length=5)))
        asked = tuple(Query(text[first:25], Budget(16, 8, 4)) for first in (20, 23))
        self._step(Entry(name, 10, text[10:20], budget=Budget(16, 8, 4), queries=asked))
        self._step(Entry(name, 20, text[20:], budget=Budget(64, 16, 4), closing=True))
        self._tidy()

    def stats(self) -> admin_pb2.StatsReply:
        return self._admin.Stats(admin_pb2.StatsRequest(), timeout=DEADLINE, metadata=AUTHORIZED)

    def close(self) -> None:
        self._outbound.put(None)
        self._channel.close()

    def _step(self, entry: Entry) -> None:
        request = client_wire.request_message(next(self._steps), [entry])
        if self._namespace is not None:
            request.namespace.CopyFrom(self._namespace)
            self._namespace = None
        self._outbound.put(request)
        assert next(self._call) == reply_to(request, self._engine.step([entry]))

    def _tidy(self) -> None:
        """Leaves room for the namespaces that are made up, and makes those that were dropped anew."""
        listed = self._admin.ListNamespaces(
            admin_pb2.ListNamespacesRequest(), timeout=DEADLINE, metadata=AUTHORIZED
        ).namespaces
        if len(listed) > LIMITS.namespaces // 2:
            for found in listed:
                if found not in (namespace("control"), *NAMESPACES):
                    self._drop(found)
        for missing in NAMESPACES:
            if missing not in listed:
                opening = iter([admin_pb2.WarmupRequest(namespace=missing)])
                self._admin.Warmup(opening, timeout=DEADLINE, metadata=AUTHORIZED)

    def _drop(self, found: drafting_pb2.Namespace) -> None:
        flush = admin_pb2.FlushRequest(namespace=found, all=True)
        drop = admin_pb2.DropNamespaceRequest(namespace=found)
        self._admin.Flush(flush, timeout=DEADLINE, metadata=AUTHORIZED)
        self._admin.DropNamespace(drop, timeout=DEADLINE, metadata=AUTHORIZED)


class Fuzzed:
    """The process, the untouched session, and what of the machine the process had at the start."""

    def __init__(self, process: DatastoreService) -> None:
        self.endpoint, self._process = process.endpoint, process
        self.control = Control(process.endpoint)
        self._seen = psutil.Process(process.pid)
        self._descriptors = self._seen.num_fds()

    def check_alive(self) -> None:
        assert self._process.running, self._process.logs()[-5000:]
        self.control.check()

    def check_nothing_left(self) -> None:
        """Once the grace has passed: no stream but the control's, no session, no thread too many, and of descriptors those
        of the segments that are mapped."""
        eventually(lambda: self.control.stats().streams == 1, "streams are left", SECONDS)
        eventually(
            lambda: not any(n.sessions for n in self.control.stats().namespaces), "sessions are left", SECONDS
        )
        eventually(
            lambda: self._seen.num_fds() <= self._descriptors + 8 + self._segments(),
            "descriptors are left",
            SECONDS,
        )
        assert self._seen.num_threads() < LIMITS.streams + 64
        assert self._seen.memory_info().rss < 2 << 30

    def _segments(self) -> int:
        return sum(tier.segments for n in self.control.stats().namespaces for tier in n.tiers)

    def check_logs(self) -> None:
        lines = [json.loads(line) for line in self._process.logs().splitlines()]
        raised = [line for line in lines if "traceback" in line]
        assert not raised, raised[0]["traceback"]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzzed")
    token = folder / "token"
    token.write_text(TOKEN)
    write_corpora(folder / "data" / "corpora")
    flags = ("--vocab-size", VOCAB, "--grace", GRACE, "--sessions", SESSIONS, "--data", folder / "data")
    with DatastoreService(
        folder / "log", *flags, "--admin-token-file", token, "--log-level", "warning"
    ) as process:
        fuzzed = Fuzzed(process)
        yield fuzzed
        fuzzed.control.close()


def write_corpora(folder: Path) -> None:
    """Files for WarmupFile: right ones, damaged ones, and what is no file below the folder."""
    folder.mkdir(parents=True)
    (folder / "ids.jsonl").write_text('{"ids": [1, 2, 3]}\n' * 3)
    (folder / "too_large.jsonl").write_text(json.dumps({"ids": [1, VOCAB]}))
    (folder / "damaged.jsonl").write_text('{"ids": [1, 2]}\n{"ids"')
    (folder / "text.txt").write_text("w1 w2 w3")
    (folder / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    (folder / "damaged.npy").write_bytes(b"\x93NUMPY\x01\x00 and then nothing")
    np.save(folder / "ids.npy", np.arange(50).reshape(5, 10))
    np.save(folder / "reals.npy", np.array([0.5, float("nan")]))
    (folder / "folder.jsonl").mkdir()
    (folder / "outside.jsonl").symlink_to("/proc/self/environ")
    write_tokenizer(folder, "w")


@pytest.fixture(autouse=True)
def nothing_is_left(fuzzed) -> Iterator[None]:
    yield
    fuzzed.check_alive()
    fuzzed.check_nothing_left()
    fuzzed.check_logs()


# Tests


def payloads_of(method: MethodDescriptor) -> st.SearchStrategy[list[bytes]]:
    """One serialized message, or a few where the method takes a stream, the first of which then has a namespace."""
    one = messages(method.input_type, ORDINARY)
    if not method.client_streaming:
        return st.tuples(one).map(serialized)
    return st.lists(one, max_size=4).map(named).map(serialized) | st.lists(one, max_size=3).map(serialized)


def named(requests: list[Message]) -> list[Message]:
    for request in requests[:1]:
        if "namespace" in request.DESCRIPTOR.fields_by_name:
            request.namespace.CopyFrom(namespace("a"))
    for request in requests[1:]:
        request.ClearField("namespace")
    return requests


def serialized(requests: Sequence[Message]) -> list[bytes]:
    return [request.SerializeToString() for request in requests]


@pytest.mark.parametrize("method", METHODS, ids=name_of)
@TRIES
@given(data=st.data())
def test_any_message(fuzzed, method, data):
    payloads = data.draw(payloads_of(method))
    check(method, payloads, outcome := call(fuzzed.endpoint, method, payloads))
    event(outcome.code)
    fuzzed.check_alive()


@pytest.mark.parametrize("method", METHODS, ids=name_of)
@TRIES
@given(data=st.data())
def test_any_bytes(fuzzed, method, data):
    payloads = data.draw(payloads_of(method))
    if payloads:
        at = data.draw(st.integers(0, len(payloads) - 1))
        payloads[at] = data.draw(broken(payloads[at][:2000]))
    check(method, payloads, outcome := call(fuzzed.endpoint, method, payloads))
    event(outcome.code)
    fuzzed.check_alive()


METADATA = st.sampled_from(
    ("", "Bearer", "Bearer ", "Bearer wrong", "bearer secret", "Bearer secret ", "Bearer secre", "Bearer secrets",
     "secret", "Basic secret", "Bearer " + "x" * 5000)
)  # fmt: skip


@pytest.mark.parametrize("method", ADMIN_METHODS, ids=name_of)
@settings(TRIES, max_examples=20 * EFFORT)
@given(data=st.data())
def test_no_admin_call_without_the_token(fuzzed, method, data):
    payloads = data.draw(payloads_of(method))
    metadata = data.draw(st.just(()) | st.tuples(st.tuples(st.just("authorization"), METADATA)))
    outcome = call(fuzzed.endpoint, method, payloads, metadata)
    given = (
        "another admin token than the service's" if any(value for _, value in metadata) else "no admin token"
    )
    assert outcome == Outcome([], "UNAUTHENTICATED", f"authorization: {given}")
    fuzzed.check_alive()


@st.composite
def conversations(draw: st.DrawFn) -> list[drafting_pb2.DraftRequest]:
    """Sessions as workers send them, and then messages lost, repeated, exchanged, overlapping or reaching too far."""
    requests = []
    for session in draw(st.lists(st.sampled_from("pqr"), min_size=1, max_size=3, unique=True)):
        text = draw(st.lists(st.integers(0, 4), min_size=1, max_size=60))
        cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=5)) | {0, len(text)})
        entries = [
            drafting_pb2.Entry(
                session=session, start=begin, tokens=text[begin:end], budget={"nodes": 16, "depth": 8, "children": 4}
            )
            for begin, end in itertools.pairwise(cuts)
        ]  # fmt: skip
        entries[0].opening.prompt_length = draw(st.integers(0, 9))
        entries[0].opening.conversation = draw(st.sampled_from(("", "talk")))
        entries[-1].closing = draw(st.booleans())
        requests += [drafting_pb2.DraftRequest(entries=[entry]) for entry in entries]
    for _ in range(draw(st.integers(0, 6))):
        draw(st.sampled_from((_lost, _repeated, _exchanged, _joined, _shifted)))(draw, requests)
    for request in requests:
        if draw(st.booleans()):
            _ask(draw, request)
    return [with_columns(request) if draw(st.booleans()) else request for request in requests]


def _ask(draw: st.DrawFn, request: drafting_pb2.DraftRequest) -> None:
    """Queries of some of its entries."""
    counts = [draw(st.integers(0, 2)) for _ in request.entries]
    suffixes = [draw(st.lists(st.integers(0, 4), max_size=9)) for _ in range(sum(counts))]
    request.queries.counts.extend(counts)
    request.queries.tokens.extend(itertools.chain(*suffixes))
    request.queries.lengths.extend(map(len, suffixes))
    request.queries.nodes.extend([16] * len(suffixes))
    request.queries.depths.extend([8] * len(suffixes))
    request.queries.children.extend([4] * len(suffixes))


def _lost(draw: st.DrawFn, requests: list) -> None:
    if len(requests) > 1:
        requests.pop(draw(st.integers(0, len(requests) - 1)))


def _repeated(draw: st.DrawFn, requests: list) -> None:
    chosen = draw(st.sampled_from(requests))
    requests.insert(draw(st.integers(0, len(requests))), drafting_pb2.DraftRequest(entries=chosen.entries))


def _exchanged(draw: st.DrawFn, requests: list) -> None:
    a, b = (draw(st.integers(0, len(requests) - 1)) for _ in range(2))
    requests[a], requests[b] = requests[b], requests[a]


def _joined(draw: st.DrawFn, requests: list) -> None:
    """Two messages become one, perhaps with two entries of a session."""
    if len(requests) > 1:
        at = draw(st.integers(0, len(requests) - 2))
        requests[at].entries.extend(requests.pop(at + 1).entries)


def _shifted(draw: st.DrawFn, requests: list) -> None:
    """Starts elsewhere than the text so far ends."""
    entry = draw(st.sampled_from(draw(st.sampled_from(requests)).entries))
    entry.start = min(max(0, entry.start + draw(st.sampled_from((-7, -1, 1, 7, 2**31)))), 2**32 - 1)


session_numbers = itertools.count()


@settings(TRIES, max_examples=150 * EFFORT)
@given(requests=conversations())
def test_lost_repeated_exchanged_and_overlapping_messages(fuzzed, requests):
    """Answered exactly as an engine in this process answers them."""
    ours = namespace("conversations")
    engine = Engine(VOCAB, limits=Limits(sessions=SESSIONS))
    number = next(session_numbers)  # what an earlier try left is closed by the grace: not these
    for step, request in enumerate(requests):
        request.step = step
        request.namespace.CopyFrom(ours)
        for entry in request.entries:
            entry.session += str(number)
    outcome = call(fuzzed.endpoint, DRAFT, serialized(requests))
    replies = [drafting_pb2.DraftReply.FromString(reply) for reply in outcome.replies]
    assert replies == list(expected_replies(engine, requests, outcome))
    flush = admin_pb2.FlushRequest(namespace=ours, all=True)
    (method,) = (method for method in ADMIN_METHODS if method.name == "Flush")
    assert call(fuzzed.endpoint, method, serialized([flush])).code == "OK"
    fuzzed.check_alive()


def expected_replies(
    engine: Engine, requests: Sequence[drafting_pb2.DraftRequest], outcome: Outcome
) -> Iterator[drafting_pb2.DraftReply]:
    """Up to the first request that is refused; then checks that the service refused it too."""
    for request in requests:
        try:
            entries = server_wire.read_entries(request, VOCAB, LIMITS)
        except RefusalError as refusal:
            assert (outcome.code, outcome.details) == (refusal.code.name, str(refusal))
            return
        yield reply_to(request, step_without_refused(entries, engine.step))
    assert outcome.code == "OK"


def reply_to(request: drafting_pb2.DraftRequest, replies: Sequence[Reply]) -> drafting_pb2.DraftReply:
    message = server_wire.reply_message(request.step, replies, packed=request.HasField("columns"))
    message.without_rejected = request.HasField("namespace")  # this service has no rejected tier
    message.tenants = message.columns = request.HasField("namespace")
    return message


@settings(TRIES, max_examples=100 * EFFORT)
@given(requests=conversations(), after=st.integers(0, 6))
def test_streams_cancelled_after_any_reply(fuzzed, requests, after):
    requests[0].namespace.CopyFrom(namespace("cut"))
    outcome = call(fuzzed.endpoint, DRAFT, serialized(requests), cancelled_after=after)
    # The service may refuse the next message before it sees the cancellation.
    assert outcome.code in {"CANCELLED", "OK", *REFUSALS} or len(outcome.replies) < after, outcome
    fuzzed.check_alive()


@settings(TRIES, max_examples=100 * EFFORT)
@given(requests=conversations(), nbytes=st.integers(0, 1500), reset=st.booleans())
def test_connections_cut_after_any_byte(fuzzed, requests, nbytes, reset):
    requests[0].namespace.CopyFrom(namespace("cut"))
    with Cut(fuzzed.endpoint, nbytes, reset) as cut:
        outcome = call(cut.endpoint, DRAFT, serialized(requests))
    assert outcome.code in ("OK", "UNAVAILABLE", "INVALID_ARGUMENT"), outcome
    fuzzed.check_alive()


@settings(TRIES, max_examples=100 * EFFORT)
@given(preface=st.booleans(), noise=st.binary(max_size=200))
def test_connections_that_speak_something_else(fuzzed, preface, noise):
    host, _, port = fuzzed.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if preface else b"") + noise)
    fuzzed.check_alive()


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_messages_beyond_the_size_limit(fuzzed, method):
    """gRPC refuses them before they are read into a message, with the sizes."""
    unknown_field = b"\xa2\x1f" + b"\xff\xff\xff\x1f" + b"x" * (LIMITS.message_bytes - 1)
    outcome = call(fuzzed.endpoint, method, [unknown_field])
    assert outcome.code == "RESOURCE_EXHAUSTED" and TOO_LARGE.search(outcome.details), outcome


def test_a_message_as_large_as_may_be(fuzzed):
    entry = drafting_pb2.Entry(session="large", tokens=[1, 2], opening={}, closing=True)
    request = drafting_pb2.DraftRequest(step=1, namespace=namespace("large"), entries=[entry])
    payload = request.SerializeToString()
    unknown_field = b"\xa2\x1f" + b"\x80\xff\xff\x1f" + b"x" * (LIMITS.message_bytes - 128)
    assert LIMITS.message_bytes - 100 < len(payload + unknown_field) <= LIMITS.message_bytes
    # A stream must greet in time, however long the large message takes.
    greeting = drafting_pb2.DraftRequest(namespace=namespace("large"))
    payloads = [greeting.SerializeToString(), payload + unknown_field]
    check(DRAFT, payloads, outcome := call(fuzzed.endpoint, DRAFT, payloads))
    assert outcome.code == "OK"


def test_more_tokens_than_a_session_may_have(fuzzed):
    """Refused with a status of its own, beside an entry that is fine."""
    tokens = [1] * (Limits().session_tokens + 1)
    large = drafting_pb2.Entry(session="large", tokens=tokens, opening={}, closing=True)
    fine = drafting_pb2.Entry(session="fine", tokens=[1], opening={}, closing=True)
    request = drafting_pb2.DraftRequest(step=1, namespace=namespace("large"), entries=[large, fine])
    outcome = call(fuzzed.endpoint, DRAFT, serialized([request]))
    (reply,) = (drafting_pb2.DraftReply.FromString(reply) for reply in outcome.replies)
    assert list(reply.statuses) == [drafting_pb2.STATUS_OVER_BUDGET, drafting_pb2.STATUS_OK]


class Cut:
    """A TCP proxy that lets so many bytes of each connection reach the service and then breaks it at both ends."""

    def __init__(self, endpoint: str, nbytes: int, reset: bool) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target, self._nbytes, self._reset = (host, int(port)), nbytes, reset
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Cut:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed: the test is over
                return
            far = socket.create_connection(self._target)
            back = threading.Thread(target=self._back, args=(far, near), daemon=True)
            back.start()
            self._forth(near, far)
            self._break(near, far, back)

    def _forth(self, near: socket.socket, far: socket.socket) -> None:
        left = self._nbytes
        try:
            while left and (data := near.recv(left)):
                far.sendall(data)
                left -= len(data)
        except OSError:  # the service was quicker
            return

    def _break(self, near: socket.socket, far: socket.socket, back: threading.Thread) -> None:
        for end in (near, far):
            if self._reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):  # broken already
                end.shutdown(socket.SHUT_RD)  # a socket that a thread reads from is not closed
        back.join()
        near.close()
        far.close()

    @staticmethod
    def _back(far: socket.socket, near: socket.socket) -> None:
        try:
            while data := far.recv(65536):
                near.sendall(data)
        except OSError:  # cut
            return
