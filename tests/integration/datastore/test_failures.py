"""A worker's client while real service processes are killed, paused, slowed and restarted."""

import itertools
import logging
import queue
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from datastore_service.client import open_datastore, tokenizer_fingerprint
from datastore_service.client.breaker import BreakerState
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Budget, Entry, Namespace, Opening, Status
from tests.integration.datastore.conftest import VOCAB
from tests.support.remembering import Remembering
from tests.support.servers.datastore import DatastoreService
from tests.waiting import eventually

DEADLINE = 0.05
PATIENCE = 60.0  # deadline of a step that a busy machine is to answer all the same
NOT_PUBLISHED = Opening(publish=False)
MISSES = 3  # after which a service is not asked
WORK = 0.03  # seconds of a step beside its wait


class Replies(queue.SimpleQueue):
    """Where the thread of a step waits for its reply. waits: the seconds that each wait was given, which a slow machine does not
    lengthen."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def get(self, timeout):
        self.waits.append(timeout)
        return super().get(timeout=timeout)


class Worker:
    """Decodes ten documents of the corpus, one token a step: the prior alone can draft them. number: tells which ten. there: whether
    the service is, so that it must be connected to. deadline: of its steps."""

    def __init__(
        self, endpoint: str, tokenizer, corpus, number: int = 0, name: str = "s", there: bool = True
    ) -> None:
        namespace = Namespace("m", tokenizer_fingerprint(tokenizer))
        self.datastore = Remembering(lambda texts: open_datastore(endpoint, namespace, VOCAB, texts=texts))
        (self.link,) = self.datastore.links.values()
        self.link._stream._arrived = self.replies = Replies()
        assert not there or self.link._stream.wait_connected(PATIENCE)
        self.text = corpus[1][10 * number : 10 * number + 10].ravel().astype(np.int32)
        self.length, self.name, self.deadline = 100, name, PATIENCE
        opening = Opening(prompt_length=self.length)
        self.datastore.post([Entry(name, tokens=self.text[: self.length], opening=opening)])

    def step(self):
        tokens = self.text[self.length : self.length + 1]
        entry = Entry(self.name, start=self.length, tokens=tokens, budget=Budget(8))
        self.length += 1
        (reply,) = self.datastore.step([entry], self.deadline)
        return reply

    def waits_of(self, steps: int) -> list[float]:
        """The seconds that so many steps with a deadline were ready to wait, one number for each wait."""
        self.replies.waits.clear()
        self.deadline = DEADLINE
        for _ in range(steps):
            reply = self.step()
            assert (reply.status, reply.known) == (Status.OK, self.length)
        self.deadline = PATIENCE
        return self.replies.waits

    def drafted_from_prior(self) -> bool:
        tree = self.step().tree
        return bool(len(tree)) and tree.sources[0] == Tier.PRIOR and tree.tokens[0] == self.text[self.length]

    def until(self, condition) -> None:
        """Steps until the condition holds, which takes steps."""
        eventually(condition, "the drafts do not come back")

    @property
    def breaker(self) -> BreakerState:
        return self.link.breaker.state


@pytest.fixture
def service(prior, tmp_path):
    with DatastoreService(tmp_path / "log", "--prior", prior, "--log-level", "warning") as process:
        yield process


@pytest.fixture
def worker(service, tokenizer, corpus):
    worker = Worker(service.endpoint, tokenizer, corpus)
    yield worker
    worker.datastore.close()


def test_drafts_from_the_prior(worker):
    assert all(worker.drafted_from_prior() for _ in range(50))


def test_kill_and_restart(service, worker, caplog):
    """Replies keep coming while the service is gone; afterwards the session is resent and the prior drafts again. The breaker opens
    once and closes once."""
    caplog.set_level(logging.WARNING, "datastore_service.client.link")
    assert worker.drafted_from_prior()
    service.kill()
    waits = worker.waits_of(100)
    assert len(waits) <= MISSES and max(waits, default=0.0) <= DEADLINE
    assert worker.breaker is BreakerState.OPEN
    service.start()
    worker.until(worker.drafted_from_prior)
    assert worker.breaker is BreakerState.CLOSED
    assert all(worker.drafted_from_prior() for _ in range(20))
    assert worker.step().known == worker.length
    lines = [record.message for record in caplog.records if record.name.endswith("client.link")]
    assert [line.split("; ")[1] for line in lines] == ["not asked until it answers again", "asked again"]


def test_paused_service(service, worker):
    """No step waits longer than its deadline, and after the breaker opens none waits at all."""
    assert worker.drafted_from_prior()
    service.signal(signal.SIGSTOP)
    waits = worker.waits_of(MISSES)
    assert len(waits) == MISSES and max(waits) <= DEADLINE
    assert worker.breaker is BreakerState.OPEN
    assert worker.waits_of(100) == []
    service.signal(signal.SIGCONT)
    worker.until(worker.drafted_from_prior)


@pytest.mark.clock
@pytest.mark.parametrize("gone", [signal.SIGSTOP, signal.SIGKILL])
def test_the_seconds_that_a_service_that_is_gone_costs(service, worker, gone):
    """Of each step at most its deadline, and nothing once the breaker is open."""
    assert worker.drafted_from_prior()
    service.signal(gone)
    worker.deadline = DEADLINE
    times = [seconds_of(worker.step) for _ in range(MISSES)]
    assert max(times) < DEADLINE + WORK
    times = [seconds_of(worker.step) for _ in range(100)]
    assert sum(times) < 100 * DEADLINE / 10


def seconds_of(work) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


@pytest.mark.parametrize("gone", ["paused", "started again"])
def test_what_ends_while_the_service_is_not_asked_is_learned(service, worker, gone):
    """Of a text that only the live tier can know, nothing is lost."""
    text = np.random.default_rng(5).permutation(2000).astype(np.int32)
    ending = [Entry("ends", tokens=text[:100], opening=Opening(prompt_length=100))]
    ending += [Entry("ends", start, text[start : start + 1], budget=Budget(8)) for start in range(100, 1999)]
    worker.until(worker.drafted_from_prior)
    half = len(ending) // 2
    for entry in ending[:half]:
        worker.datastore.step([entry], DEADLINE)
    if gone == "paused":
        service.signal(signal.SIGSTOP)
    else:
        service.kill()
    for entry in ending[half:]:
        worker.datastore.step([entry], DEADLINE)
    if gone == "started again":
        service.start()
        assert worker.link._stream.wait_connected(PATIENCE)
        assert not worker.link.allows_calls, "a step has told it of the session"
    worker.datastore.post([Entry("ends", 1999, text[1999:], closing=True)])
    service.signal(signal.SIGCONT)
    worker.until(worker.drafted_from_prior)

    def is_live(begin: int) -> bool:
        asking = Entry(f"at {begin}", tokens=text[begin - 9 : begin], opening=NOT_PUBLISHED, budget=Budget(8))
        tree = worker.datastore.step([asking], PATIENCE)[0].tree
        worker.datastore.post([Entry(f"at {begin}", 9, closing=True)])
        return tree.tokens[tree.sources == Tier.LIVE][:4].tolist() == text[begin : begin + 4].tolist()

    eventually(lambda: is_live(1900), "it is lost")
    assert all(map(is_live, range(110, 1990, 47)))


def test_service_that_appears_later(service, tokenizer, corpus):
    service.kill()
    worker = Worker(service.endpoint, tokenizer, corpus, there=False)
    assert worker.step().status is Status.OK
    service.start()
    worker.until(worker.drafted_from_prior)
    worker.datastore.close()


def test_many_sessions_come_back(service, worker, corpus):
    """All sessions of a batch are resent, with the text they grew meanwhile."""
    texts = corpus[1][10:90].reshape(8, -1).astype(np.int32)
    for i, text in enumerate(texts):
        worker.datastore.post([Entry(f"b{i}", tokens=text[:50], opening=Opening(prompt_length=50))])

    def step(length: int, deadline: float = PATIENCE):
        entries = [
            Entry(f"b{i}", length, t[length : length + 1], budget=Budget(4)) for i, t in enumerate(texts)
        ]
        return worker.datastore.step(entries, deadline)

    service.kill()
    for length in range(50, 100):
        step(length, DEADLINE)
    service.start()
    lengths = itertools.count(100)

    def all_from_prior() -> bool:
        length = next(lengths)
        return all(
            len(reply.tree) and reply.tree.tokens[0] == text[length + 1]
            for reply, text in zip(step(length), texts, strict=True)
        )

    worker.until(all_from_prior)


def test_slow_network(service, tokenizer, corpus):
    """A service beyond the deadline opens the breaker; when it is quick again, its drafts return."""
    with Gate(service.endpoint) as gate:
        worker = Worker(gate.endpoint, tokenizer, corpus)
        assert worker.drafted_from_prior()
        gate.open.clear()
        waits = worker.waits_of(10)
        assert len(waits) == MISSES and max(waits) <= DEADLINE
        assert worker.breaker is BreakerState.OPEN
        gate.open.set()
        worker.until(worker.drafted_from_prior)
        worker.datastore.close()


def test_two_workers_at_once(service, tokenizer, corpus):
    first = Worker(service.endpoint, tokenizer, corpus, 1, "one")
    second = Worker(service.endpoint, tokenizer, corpus, 2, "two")

    def decode(worker: Worker) -> None:
        assert all(worker.drafted_from_prior() for _ in range(200))

    with ThreadPoolExecutor(2) as pool:
        for outcome in [pool.submit(decode, worker) for worker in (first, second)]:
            outcome.result(600)
    first.datastore.close()
    assert second.drafted_from_prior()
    second.datastore.close()


def test_two_services_are_two_stores(service, prior, tokenizer, corpus, tmp_path):
    """Killing one leaves the other's worker untouched."""
    with DatastoreService(tmp_path / "second", "--prior", prior) as other:
        here = Worker(service.endpoint, tokenizer, corpus, 1)
        there = Worker(other.endpoint, tokenizer, corpus, 2)
        other.kill()
        there.step()
        assert all(here.drafted_from_prior() for _ in range(20))
        here.datastore.close()
        there.datastore.close()


class Gate:
    """A TCP proxy that holds back what the service sends while it is not open."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target, self.open = (host, int(port)), threading.Event()
        self.open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.open.set()
        self._listener.close()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed: the test is over
                return
            far = socket.create_connection(self._target)
            self._sockets += near, far
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, held_back: bool) -> None:
        try:
            while data := source.recv(65536):
                if held_back:
                    self.open.wait()
                sink.sendall(data)
        except OSError:  # either end is gone
            return
