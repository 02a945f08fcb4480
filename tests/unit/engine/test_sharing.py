"""What a live tier knows of where its outputs were published."""

import numpy as np
import pytest

from datastore_service.engine.engine import Engine
from datastore_service.engine.limits import Limits
from datastore_service.engine.live import fresh_writer
from datastore_service.engine.provenance import PROVENANCE, Subject
from datastore_service.protocol.types import Entry, Opening

VOCAB = 1000


@pytest.fixture
def engine():
    return Engine(VOCAB, limits=Limits(live_tokens=10_000))


def publish(engine, *numbers):
    for number in numbers:
        text = np.arange(number, number + 10, dtype=np.int32)
        engine.step([Entry("s", 0, text, opening=Opening(user=f"u{number}"), closing=True)])


def of(origin, number, published=1 << 40):
    return np.array([(0, 0, published, origin, number)], PROVENANCE)


def first_tokens(engine, after=0):
    return [int(text[0]) for text, _ in engine.published_here(after)]


@pytest.mark.parametrize("sealed", [False, True])
def test_outputs_come_after_a_number_in_their_order(engine, sealed):
    publish(engine, 1, 2, 3)
    if sealed:
        engine.compact()
    publish(engine, 4)
    numbers = [int(provenance["number"][0]) for _, provenance in engine.published_here(0)]
    assert numbers == sorted(set(numbers)) and numbers[-1] == engine.published.last
    assert first_tokens(engine) == [1, 2, 3, 4]
    assert first_tokens(engine, numbers[1]) == [3, 4] and first_tokens(engine, numbers[3]) == []
    assert engine.waiting(numbers[0], numbers[2]) == 2


def test_numbers_rise_though_the_clock_goes_back(engine, monkeypatch):
    publish(engine, 1)
    monkeypatch.setattr(fresh_writer.time, "time_ns", lambda: 0)
    publish(engine, 2)
    assert first_tokens(engine) == [1, 2]
    assert engine.published.outputs == 2


@pytest.mark.parametrize("sealed", [False, True])
def test_an_output_of_another_is_taken_once(engine, sealed):
    text = np.arange(10, dtype=np.int32)
    assert engine.take(text, of(7, 1))
    if sealed:
        engine.compact()
    held = engine.live_tokens
    assert engine.take(text, of(7, 1)) and engine.live_tokens == held
    assert engine.take(text, of(7, 2)) and engine.take(text, of(8, 1))
    engine.compact()
    assert engine.live_tokens == 30
    assert first_tokens(engine) == [] and engine.published.outputs == 0


@pytest.mark.parametrize("sealed", [False, True])
def test_an_output_that_comes_back_under_an_earlier_name_is_not_taken(engine, sealed):
    """The data directory is a copy, or was restored. Another service's output of the same number is another output."""
    publish(engine, 1, 2)
    if sealed:
        engine.compact()
    held = engine.live_tokens
    for text, provenance in list(engine.published_here(0)):
        assert engine.take(text, of(7, provenance["number"][0])) and engine.live_tokens == held
    assert engine.take(text + 1, of(7, provenance["number"][0]))
    engine.compact()
    assert engine.live_tokens == 30


def test_what_is_too_old_is_not_taken():
    engine = Engine(VOCAB, limits=Limits(live_seconds=3600))
    assert engine.take(np.arange(10, dtype=np.int32), of(7, 1, published=1))
    assert engine.live_tokens == 0


def test_what_is_forgotten_is_no_longer_to_be_sent(engine):
    publish(engine, 1, 2, 3)
    engine.forget([Subject.named("user", "u2")])
    assert first_tokens(engine) == [1, 3]
