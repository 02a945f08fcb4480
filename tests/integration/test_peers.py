"""Peers of the worker that say anything: a datastore and a draft side. What they send goes through the product's own code as far as
the verified tokens, which must be plain decoding's; what is right beside it must arrive.

`make test-long` sends 100,000 inputs of each, `make test` a slice."""

from __future__ import annotations

import random
import struct
import threading
import time
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec
import numpy as np
import psutil
import pytest

from datastore_service.client import metrics
from datastore_service.client.base import NoTexts
from datastore_service.client.breaker import CircuitBreaker
from datastore_service.client.link import Link
from datastore_service.client.remote import GrpcDatastore
from datastore_service.client.resilient import ResilientDatastore
from datastore_service.engine.engine import Engine
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import (
    Budget,
    Entry,
    Namespace,
    Opening,
    Query,
    Reply,
    Status,
)
from datastore_service.server.limits import ServiceLimits
from datastore_service.server.wire import read_entries, reply_message
from proto_gen.specstore.v1 import drafting_pb2 as pb
from sglang_patches.drafting import cache as speculation_cache
from sglang_patches.exchange import trie as speculation_trie
from sglang_patches.exchange.messages import Growth, Lost, Opened
from sglang_patches.exchange.wire import DamagedFrameError, answers_from_draft, frame_of
from tests.support.agreeing_model import VOCABULARY, model, target
from tests.support.columns import pack_trees
from tests.support.draft_side import InProcessDraftSide
from tests.support.greedy_step import emitted_greedily
from tests.unit.drafting.test_speculation import NODES, Run

INPUTS, ALL_INPUTS = 1_000, 100_000
WIDTH = 8
EDGES = (0, 1, 2, 7, 16, 17, 255, 256, 5000, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
REALS = (float("nan"), float("inf"), float("-inf"), -1.0, -0.0, 1.5, 5e-324, 3e38)


@pytest.fixture
def inputs(pytestconfig) -> int:
    return ALL_INPUTS if pytestconfig.getoption("--long") else INPUTS


@pytest.fixture(autouse=True)
def nothing_leaks():
    """No descriptor, no thread, and no more memory than what is compiled and imported on the way."""
    process = psutil.Process()
    files, threads, memory = process.num_fds(), threading.active_count(), process.memory_info().rss
    yield
    limit = time.monotonic() + 30
    while (process.num_fds() > files + 4 or threading.active_count() > threads) and time.monotonic() < limit:
        time.sleep(0.05)
    assert process.num_fds() <= files + 4 and threading.active_count() <= threads
    assert process.memory_info().rss - memory < 400 << 20


# A datastore

TEXT = [3, 5, 8, 13, 21, 34, 55, 89, 44, 33]
BUDGETS = {"a": Budget(WIDTH - 1), "b": Budget(5, 3, 2), "c": Budget(WIDTH - 1, 64, 1)}
ASKED = Query(np.array([7], np.int32), Budget(4))
COLUMNS = ("tokens", "parents", "probs", "sources")


class Damaging:
    """A service whose replies are right, until `damage` has been at them. whole: trees of the last reply that nothing was done to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.whole: list[DraftTree | None] = []
        self.done: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(8)
        self._server = grpc.server(self._threads)
        handler = grpc.stream_stream_rpc_method_handler(self._draft, pb.DraftRequest.FromString, bytes)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("specstore.v1.Drafting", {"Draft": handler})]
        )
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None).wait()
        self._threads.shutdown()

    def _draft(self, requests, context):
        next(requests)
        yield pb.DraftReply(tenants=True, columns=True).SerializeToString()
        for request in requests:
            yield self._answer(request)

    def _answer(self, request: pb.DraftRequest) -> bytes:
        entries = read_entries(request, VOCABULARY, ServiceLimits())
        counts = [len(entry.queries) for entry in entries]
        trees = [
            _sound_tree(self.random, BUDGETS[entry.session]) if entry.budget.nodes else _NO_TREE
            for entry in entries
        ]
        answers = [_sound_tree(self.random, ASKED.budget, [7]) for _ in request.queries.lengths]
        left = iter(answers)
        replies = [
            Reply(Status.OK, len(TEXT), tree, tuple(next(left) for _ in range(count)))
            for tree, count in zip(trees, counts, strict=True)
        ]
        message = reply_message(request.step, replies)
        kind = "none"
        if any(entry.budget.nodes for entry in entries):
            self.whole = [*trees, *answers]
            kind = self.random.choices(*zip(*_DAMAGES.items(), strict=True))[0]
        self.done[kind] += 1
        damaged = getattr(self, f"_{kind}")(message)
        if self.random.random() < 0.5:
            self.done["packed"] += 1
            pack_trees(message)
        return damaged or message.SerializeToString()

    def _none(self, message: pb.DraftReply) -> None:
        """Nothing is done to it."""

    def _value(self, message: pb.DraftReply) -> None:
        """Up to three values of nodes; trees without one of them stay whole."""
        ends = np.cumsum([len(tree) for tree in self.whole if tree is not None])
        for _ in range(self.random.randint(1, 3) if message.tokens else 0):
            at, name = self.random.randrange(len(message.tokens)), self.random.choice(COLUMNS)
            if name == "sources":
                changed = bytearray(message.sources)
                changed[at] = self.random.randrange(256)
                message.sources = bytes(changed)
            else:
                values = REALS if name == "probs" else (*EDGES, *range(VOCABULARY))
                getattr(message, name)[at] = self.random.choice(values)
                self.whole[int(np.searchsorted(ends, at, side="right"))] = None

    def _swap(self, message: pb.DraftReply) -> None:
        column = getattr(message, self.random.choice(COLUMNS[:3]))
        if len(column) > 1:
            here, there = self.random.sample(range(len(column)), 2)
            column[here], column[there] = column[there], column[here]
        self._nothing_is_whole()

    def _length(self, message: pb.DraftReply) -> None:
        names = ("statuses", "known", "nodes", *COLUMNS[:3], "counts", "sizes")
        name = self.random.choice(names)
        of_answers = {"counts": message.answers.counts, "sizes": message.answers.nodes}
        column = of_answers[name] if name in of_answers else getattr(message, name)
        if column and self.random.random() < 0.5:
            column.pop()
        else:
            column.append(1)
        self._nothing_is_whole()

    def _size(self, message: pb.DraftReply) -> None:
        column = self.random.choice((message.nodes, message.answers.nodes, message.answers.counts))
        if column:
            column[self.random.randrange(len(column))] = self.random.choice((*EDGES, 3, 4, 5))
        self._nothing_is_whole()

    def _moved(self, message: pb.DraftReply) -> None:
        """A node to another tree."""
        sizes = message.nodes
        here, there = self.random.sample(range(len(sizes)), 2)
        if sizes[here]:
            sizes[here] -= 1
            sizes[there] += 1
        self._nothing_is_whole()

    def _status(self, message: pb.DraftReply) -> None:
        at = self.random.randrange(len(message.statuses))
        message.statuses[at] = self.random.choice((0, 2, 3, 4, 5, 77, -1, 2**31 - 1))
        message.known[at] = self.random.choice(EDGES)
        self._nothing_is_whole()

    def _step(self, message: pb.DraftReply) -> None:
        message.step = self.random.choice((0, message.step + 1, 2**64 - 1))
        self._nothing_is_whole()

    def _bytes(self, message: pb.DraftReply) -> bytes:
        changed = bytearray(message.SerializeToString())
        for _ in range(self.random.randint(1, 4)):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        self._nothing_is_whole()
        return bytes(changed)

    def _nothing_is_whole(self) -> None:
        self.whole = [None] * len(self.whole)


# How often. The last two mostly end the stream, and a new one takes a tenth of a second.
_DAMAGES = {
    "none": 5,
    "value": 60,
    "swap": 15,
    "length": 10,
    "size": 5,
    "moved": 5,
    "status": 5,
    "step": 0.1,
    "bytes": 0.3,
}
_NO_TREE = DraftTree(*(np.empty(0, kind) for kind in (np.int32, np.int32, np.float32, np.uint8)))


def _sound_tree(draw: random.Random, budget: Budget, after: list[int] | None = None) -> DraftTree:
    text, nodes = [*TEXT, *(after or [])], []
    while len(nodes) < budget.nodes:
        parent = draw.randint(-1, len(nodes) - 1) if budget.children > 1 else len(nodes) - 1
        path, at = [], parent
        while at >= 0:
            path.append(nodes[at][1])
            at = nodes[at][0]
        token = target([*text, *path[::-1]]) if draw.random() < 0.7 else draw.randrange(VOCABULARY)
        siblings = [other for above, other, _ in nodes if above == parent]
        if len(path) >= budget.depth or token in siblings or len(siblings) >= budget.children:
            break
        nodes.append((parent, token, (nodes[parent][2] if parent >= 0 else 1.0) * draw.random()))
    if not nodes:
        return _NO_TREE
    parents, tokens, probs = zip(*nodes, strict=True)
    sources = np.array([draw.choice((1, 2, 3, 4)) for _ in nodes], np.uint8)
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32), sources
    )


def test_a_datastore_that_answers_anything(inputs):
    service = Damaging(seed=1)
    stream = GrpcDatastore(service.endpoint, Namespace("m", "t"), vocab_size=VOCABULARY)
    patient = CircuitBreaker(failures=10**9)
    datastore = ResilientDatastore([Link("peer", stream, patient)], Engine(VOCABULARY), NoTexts())
    assert stream.wait_connected(60)
    datastore.post(
        [Entry(name, tokens=np.array(TEXT, np.int32), opening=Opening(prompt_length=5)) for name in BUDGETS]
    )
    unreadable = metrics.FAILURES.labels("unreachable")._value
    dropped = {
        fault: metrics.DAMAGED_TREES.labels(fault)._value for fault in ("parents", "tokens", "probs", "size")
    }
    before = {fault: counter.get() for fault, counter in dropped.items()}
    asked = [
        Entry(name, len(TEXT), budget=budget, queries=(ASKED,) if name == "b" else ())
        for name, budget in BUDGETS.items()
    ]
    budgets = [*BUDGETS.values(), ASKED.budget]
    arrived = lengths = 0
    try:
        for _ in range(inputs):
            assert stream.wait_connected(60)
            failures = unreadable.get()
            replies = datastore.step(asked, 60.0)
            trees = [*(reply.tree for reply in replies), *replies[1].trees]
            for tree, budget in zip(trees, budgets, strict=True):
                tree.check_integrity(budget.nodes, budget.depth, budget.children)
                assert (tree.tokens < VOCABULARY).all()
            if unreadable.get() == failures:
                for tree, whole in zip(trees, service.whole, strict=True):
                    assert whole is None or tree.tokens.tolist() == whole.tokens.tolist()
                    arrived += whole is not None
            lengths += sum(map(len, emitted_greedily(trees[:3], [TEXT] * 3, WIDTH)))
    finally:
        datastore.close()
        service.close()
    print(f"\nreplies: {dict(service.done)}; {arrived} trees whole, {lengths} tokens emitted")
    assert set(service.done) >= set(_DAMAGES) - {"step", "bytes"} | {"packed"}
    assert arrived > inputs and lengths > 3 * inputs
    assert all(counter.get() > before[fault] for fault, counter in dropped.items())


# A draft side

_HEADER = struct.Struct("<4sII")


class DamagingDraftSide(InProcessDraftSide):
    """What it says arrives in frames, something was done to a fifth of them. A damaged frame ends the draft process, and the worker hears
    that all sessions are lost (`ProcessChannel`)."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(model(0.8), rounds=4)
        self._random, self._incoming = draw, answers_from_draft()
        self.done: Counter[str] = Counter()

    def collect(self, seconds: float) -> list:
        heard: list = []
        for answer in super().collect(0.0):
            kind = self._random.choice(_KINDS) if isinstance(answer, Growth) else "none"
            try:
                heard += self._through_the_wire(getattr(self, f"_{kind}")(answer))
                self.done[kind] += 1
            except DamagedFrameError:
                self.done[f"{kind}, refused"] += 1
                self._incoming = answers_from_draft()
                self.forget()
                return [
                    Lost(message.session, message.epoch)
                    for message in self.seen
                    if isinstance(message, Opened)
                ]
        self.seen = [message for message in self.seen if isinstance(message, Opened)][-8:]
        return heard

    def _through_the_wire(self, frame: bytes) -> list:
        cut = self._random.randrange(len(frame))
        return self._incoming.feed(frame[:cut]) + self._incoming.feed(frame[cut:])

    def _none(self, answer) -> bytes:
        return frame_of([answer])

    def _twice(self, answer: Growth) -> bytes:
        return frame_of([answer, answer])

    def _node(self, answer: Growth) -> bytes:
        """Values of nodes."""
        arrays = {name: getattr(answer, name).copy() for name in _ARRAYS}
        for _ in range(self._random.randint(1, 3)):
            array = arrays[self._random.choice(_ARRAYS)]
            if len(array):
                values = REALS if array.dtype == np.float32 else (*_WIDE, *range(-5, VOCABULARY))
                info = None if array.dtype == np.float32 else np.iinfo(array.dtype)
                value = self._random.choice(values)
                array[self._random.randrange(len(array))] = (
                    value if info is None else min(max(value, info.min), info.max)
                )
        return frame_of([msgspec.structs.replace(answer, **arrays)])

    def _lengths(self, answer: Growth) -> bytes:
        name = self._random.choice(_ARRAYS)
        array = getattr(answer, name)
        return frame_of(
            [msgspec.structs.replace(answer, **{name: np.concatenate([array, array])[: len(array) + 1]})]
        )

    def _types(self, answer: Growth) -> bytes:
        name = self._random.choice(_ARRAYS)
        kind = self._random.choice((np.int32, np.int64, np.float32))
        return frame_of([msgspec.structs.replace(answer, **{name: getattr(answer, name).astype(kind)})])

    def _heading(self, answer: Growth) -> bytes:
        name = self._random.choice(("session", "epoch", "turn"))
        value = self._random.choice(("", "other", "\0") if name == "session" else (*_WIDE, 2, 3))
        return frame_of([msgspec.structs.replace(answer, **{name: value})])

    def _content(self, answer: Growth) -> bytes:
        """Other MessagePack, whose checksum is right."""
        content = bytearray(frame_of([answer])[_HEADER.size :])
        for _ in range(self._random.randint(1, 3)):
            content[self._random.randrange(len(content))] = self._random.randrange(256)
        return _HEADER.pack(b"spec", len(content), zlib.crc32(content)) + content

    def _bytes(self, answer: Growth) -> bytes:
        frame = bytearray(frame_of([answer]))
        at = self._random.randrange(len(frame))
        if 4 <= at < 8:  # a longer frame would be waited for
            at = 0
        frame[at] ^= 1 << self._random.randrange(8)
        return bytes(frame)


_ARRAYS = ("nodes", "parents", "tokens", "probabilities")
_WIDE = (0, 1, -1, 100, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))
_KINDS = ("none",) * 40 + (
    "twice",
    "node",
    "node",
    "node",
    "node",
    "lengths",
    "heading",
    "types",
    "content",
    "bytes",
)


class VerifiedRun(Run):
    """Verifies by the product's own code."""

    def verified(self, text: list[int], tree: DraftTree) -> list[int]:
        (emitted,) = emitted_greedily([tree], [text], NODES + 1)
        assert emitted == super().verified(text, tree)
        return emitted


def test_a_draft_side_that_says_anything(inputs):
    draw, done, emitted, steps, seed = random.Random(2), Counter(), 0, 0, 0
    before = {sample.labels["reason"]: sample.value for sample in _dropped()}
    while done.total() < inputs:
        seed += 1
        side = DamagingDraftSide(draw)
        run = VerifiedRun(side, requests=3)
        emitted += round(run.tokens_a_step(40) * 120)
        steps += 120
        done += side.done
        for req in run.reqs:
            assert len(run.speculation._cache.trie(req.rid)) <= speculation_trie.MOST_NODES
    print(f"\ngrowths: {dict(done)}; {emitted} tokens emitted in {steps} steps")
    assert {
        "none",
        "twice",
        "node",
        "lengths",
        "heading",
        "types, refused",
        "content, refused",
        "bytes, refused",
    } <= set(done)
    assert emitted > 1.1 * steps, "what is right is drafted with"
    counted = {s.labels["reason"] for s in _dropped() if s.value > before.get(s.labels["reason"], 0.0)}
    assert {"epoch", "gap", "invalid", "parent", "replay", "session"} <= counted


def _dropped() -> list:
    (family,) = speculation_cache.DROPPED.collect()
    return [sample for sample in family.samples if sample.name.endswith("_total")]
