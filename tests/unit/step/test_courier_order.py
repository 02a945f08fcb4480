"""What the courier does on its stream is in order with the forward, and what the host reads has arrived. The streams are pretended."""

from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("sglang")
torch = pytest.importorskip("torch")

from sglang_patches.step import courier  # noqa: E402
from tests.unit.accelerator.races import OrderedEvent, OrderedStream, OrderedStreams, Races  # noqa: E402


@pytest.fixture(autouse=True)
def no_memory_is_pinned(monkeypatch):
    """There is no device to pin it for."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **how: empty(*shape, **how))


class Looked:
    """A tensor on the host, whose readings are noted."""

    def __init__(self, tensor, races):
        self._tensor, self._races = tensor, races

    def __getattr__(self, name):
        self._races.host_reads(self._tensor)
        return getattr(self._tensor, name)


@pytest.fixture
def carrier():
    """Its parcels are delivered by the test."""
    with mock.patch.object(courier.threading.Thread, "start"):
        made = courier.Courier(OrderedStreams())
    made._thread = SimpleNamespace(is_alive=lambda: True)
    return made


def run(carrier, steps=4):
    """Forwards, of which each makes its tokens anew; deliveries lag two steps behind. Returns what has no order, and what was told."""
    told, expected, parcels = [], [], []

    def deliver():
        parcel = parcels.pop(0)
        parcel.arrived.happen()
        looked = {name: Looked(getattr(parcel, name), races) for name in ("tokens", "counts")}
        carrier._deliver(parcel._replace(**looked))

    with Races(carrier._devices) as races:
        for step in range(steps):
            tokens = torch.arange(step, step + 6, dtype=torch.int32).view(2, 3) + 1
            counts = torch.full((2,), 2, dtype=torch.int32)
            expected.append([row[:2] for row in tokens.tolist()])
            carrier.send(tokens, counts, lambda found: told.append([row.tolist() for row in found]))
            del tokens, counts  # the worker keeps neither
            torch.zeros(2, 3)  # the forward goes on
            parcels.append(carrier._parcels.get())
            if step >= 2:
                deliver()
        while parcels:
            deliver()
        torch.zeros(1)
    return races.found, told, expected


def test_every_use_of_memory_is_in_order(carrier):
    found, told, expected = run(carrier)
    assert found == set() and told == expected


def without_a_fork(patch):
    patch.setattr(OrderedStream, "wait_stream", lambda self, other: None)
    return "copy_ on side beside"


def without_the_event(patch):
    patch.setattr(OrderedEvent, "synchronize", lambda self: None)
    return "a look of the host on host beside copy_ on side"


def with_an_event_of_the_forward(patch):
    """It happens before the copies."""

    def record(self, stream):
        self._streams.recorded.append(self)
        self._clock = dict(self._streams.clocks["forward"])

    patch.setattr(OrderedEvent, "record", record)
    return "a look of the host on host beside copy_ on side"


def with_sources_that_nobody_keeps(patch):
    stock = courier._Parcel
    patch.setattr(courier, "_Parcel", lambda arrived, sources, *rest: stock(arrived, (), *rest))
    return "given back on forward before copy_ on side"


@pytest.mark.parametrize(
    "broken",
    [without_a_fork, without_the_event, with_an_event_of_the_forward, with_sources_that_nobody_keeps],
)
def test_a_broken_order_is_found(carrier, monkeypatch, broken):
    expected = broken(monkeypatch)
    found, _, _ = run(carrier)
    assert any(expected in race for race in found), found
