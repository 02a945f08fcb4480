"""The steady load, on a server without a model, by a clock that ticks with each reading."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from benchmarks.serve import measure
from benchmarks.serve.cases import prompts_for
from benchmarks.serve.measure import Answer, steady_load
from tests.waiting import eventually

START = 100


class Watch:
    """The load's clock, which it reads at its start first. places: one is done once it stays empty."""

    def __init__(self, monkeypatch):
        self.places = []
        ticks = itertools.count(START)
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
        monkeypatch.setattr(measure, "ThreadPoolExecutor", self._pool)

    def _pool(self, size):
        pool = ThreadPoolExecutor(size)
        submit = pool.submit
        pool.submit = lambda work: self.places.append(submit(work)) or self.places[-1]
        return pool

    def complete(self, load):
        """Answers that were complete when the timed part ended."""
        end = START + load.seconds
        return [answer.times[-1] <= end for answer in load.answers]


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


class Server:
    """Streams prompt[0] tokens, prompt[1] a step. Those of a prompt with a third entry stop halfway until one of the watch's places
    stays empty."""

    def __init__(self, watch):
        self._watch = watch

    def stream(self, prompt, **sampling):
        tokens: list[int] = []
        while len(tokens) < prompt[0]:
            if len(prompt) > 2 and 2 * len(tokens) >= prompt[0]:
                eventually(lambda: any(place.done() for place in self._watch.places))
            tokens = [*tokens, *range(prompt[1])]
            yield {"output_ids": tokens, "meta_info": {"spec_verify_ct": len(tokens) // prompt[1]}}


def test_a_slow_last_request_does_not_stretch_the_timed_part(watch):
    """Three places: three answers are short, two go on when no prompt is left."""
    prompts = [(20, 1), (200, 1, "long"), (20, 1), (20, 1), (200, 1, "long")]
    load = steady_load(Server(watch), prompts, 3)
    assert [len(answer.tokens) for answer in load.answers] == [20, 200, 20, 20, 200]
    assert watch.complete(load) == [True, False, True, True, False]
    assert 3 * 20 <= load.produced < 3 * 20 + 2 * 200


def test_the_timed_part_ends_when_a_place_stays_empty(watch):
    """Seven equal prompts on four places: the first to end with none left ends it, before the last three are complete."""
    prompts = [(60, 2)] * 4 + [(60, 2, "last")] * 3
    assert len(prompts) == prompts_for(4)
    load = steady_load(Server(watch), prompts, 4)
    assert [answer.steps for answer in load.answers] == [30] * 7
    assert watch.complete(load) == [True] * 4 + [False] * 3
    assert 60 * 4 <= load.produced < 60 * 7


def test_tokens_between_two_chunks_come_evenly(watch):
    load = steady_load(Server(watch), [(10, 10)], 1)
    (answer,) = load.answers
    assert (answer.times, answer.counts, load.seconds) == ([START + 1, START + 2], [0, 10], 3)
    assert [answer.count_at(START + 1 + after) for after in (-1, 0.5, 2)] == [0, 5, 10]


def test_a_chunk_of_several_tokens_counts_as_so_many_gaps():
    """The first token's wait is no gap."""
    answer = Answer([1, 2, 3, 4], times=[0.0, 1.0, 1.5, 2.5], counts=[0, 1, 2, 4], steps=2)
    assert answer.gaps() == [0.5, 0.5, 0.5]
