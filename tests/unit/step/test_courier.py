"""The courier, on streams and events that are pretended: the tensors are on the CPU."""

import logging
import os
import random
import sys
import threading
import time
from queue import SimpleQueue

import numpy as np
import pytest

pytest.importorskip("sglang")
torch = pytest.importorskip("torch")

from sglang_patches.drafting.speculation import EARLY  # noqa: E402
from sglang_patches.step import courier  # noqa: E402
from tests.support.agreeing_model import model  # noqa: E402
from tests.support.draft_side import InProcessDraftSide  # noqa: E402
from tests.unit.accelerator.streams import Streams  # noqa: E402
from tests.unit.drafting.lagging import Lagging  # noqa: E402
from tests.waiting import eventually  # noqa: E402

SEEDS = range(4 * int(os.environ.get("SPECSTORE_FUZZ", "1")))
EVENTS = {"kill": 0.02, "away": 0.1, "retract": 0.1, "ends": 0.3, "finish": 0.05}


@pytest.fixture(autouse=True)
def no_memory_is_pinned(monkeypatch):
    """There is no device to pin it for."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))


def tensors(emitted):
    """As the worker has them: rows of one width, and how far each is valid."""
    counts = [len(tokens) for tokens in emitted]
    rows = [[*tokens, *[-1] * (max(counts) - len(tokens))] for tokens in emitted]
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)


def listed(emitted):
    return [tokens.tolist() for tokens in emitted]


def test_tokens_arrive_when_the_device_has_them_and_in_order():
    streams, found = Streams(), SimpleQueue()
    carrier = courier.Courier(streams)
    carrier.send(*tensors([[1, 2, 3], [4]]), found.put)
    carrier.send(*tensors([[5]]), found.put)
    first, second = streams.recorded
    second.happen()
    time.sleep(0.05)
    assert found.empty()
    first.happen()
    emitted = found.get(timeout=60)
    assert listed(emitted) == [[1, 2, 3], [4]] and emitted[0].dtype == np.int32
    assert listed(found.get(timeout=60)) == [[5]]


def test_the_copies_are_behind_the_forward_and_beside_it():
    streams = Streams()
    courier.Courier(streams).send(*tensors([[1]]), lambda emitted: None)
    eventually(lambda: len(streams.log) == 3)
    assert sorted(streams.log) == [
        "device 3 in specstore-courier",
        "event on side",
        "side waits for forward",
    ]
    assert streams.log.index("side waits for forward") < streams.log.index("event on side")
    assert streams.current is streams.forward


def test_a_cpu_and_a_host_that_pins_no_memory_have_none(monkeypatch, caplog):
    assert courier.make_courier("cpu") is None
    monkeypatch.setattr(courier, "is_pin_memory_available", lambda device: False)
    with caplog.at_level(logging.INFO):
        assert courier.make_courier("cuda") is None
    assert "without pinned memory" in caplog.text
    monkeypatch.setattr(courier, "is_pin_memory_available", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_device_module", {"cuda": Streams()}.get)
    assert courier.make_courier("cuda") is not None


def test_after_an_error_it_carries_nothing_more(caplog):
    streams, found = Streams(), SimpleQueue()
    carrier = courier.Courier(streams)

    def failing(emitted):
        raise ValueError("no room")

    with caplog.at_level(logging.ERROR):
        carrier.send(*tensors([[1]]), failing)
        streams.recorded[0].happen()
        carrier._thread.join(60)
        carrier.send(*tensors([[2]]), found.put)
    assert "the courier has ended" in caplog.text and "no room" in caplog.text
    assert len(streams.recorded) == 1


class Threads(Lagging):
    """A real courier beside the worker's loop. Events happen at any time, and some surely in time or surely too late."""

    def __init__(self, side, seed):
        self.streams, self._pauses = Streams(), random.Random(seed)
        self.courier = courier.Courier(self.streams)
        self._late, kinds = [], random.Random(seed)

        def tell(flight, emitted):
            told = threading.Event()

            def receive(found):
                assert listed(found) == emitted
                self.speculation.outcomes_ahead(flight, found)
                told.set()

            self.courier.send(*tensors(emitted), receive)
            happen, kind = self.streams.recorded[-1].happen, kinds.randrange(5)
            if kind == 0:
                self._late.append(happen)
            elif kind == 1:
                happen()
                assert told.wait(60)
            else:
                threading.Timer(self._pauses.random() * 0.004, happen).start()

        super().__init__(side, tell, seed=seed, chances=EVENTS, between=self._pause)

    def _pause(self):
        if self._pauses.random() < 0.3:
            time.sleep(self._pauses.random() * 0.002)

    def happen_late(self):
        while self._late:
            self._late.pop()()

    def check(self, rows, states):
        self.happen_late()  # the next step has been looked up
        with self.speculation._lock:
            super().check(rows, states)
            for row, state in zip(rows, states, strict=True):
                draft = self.side._side._drafts.get(state.session)
                if draft is not None and state.session in self.speculation._cache:
                    assert draft.text.after(0).tolist() == self.texts[row]

    def _meddle(self, row):
        with self.speculation._lock:  # the draft side of this test is not made for two threads
            super()._meddle(row)


@pytest.fixture
def hasty_threads():
    """A thread may be interrupted after any few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def counts():
    return np.array([EARLY.labels(result)._value.get() for result in ("told", "late")])


@pytest.mark.parametrize("seed", SEEDS)
def test_beside_the_worker_s_thread(hasty_threads, seed):
    before = counts()
    run = Threads(InProcessDraftSide(model(0.8, seed)), seed)
    run.run(80)
    run.chances = {}
    assert run.run(20) > 1.5
    run.happen_late()
    assert run.courier._thread.is_alive() and (counts() - before > 10).all()
