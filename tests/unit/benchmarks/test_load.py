"""The steady load, on a server made of sleeps whose rates are known."""

import time

import pytest

from benchmarks.serve.load import Answer, prompts_for, steady_load

TOKEN_SECONDS = 0.005


class SleepingServer:
    """Streams prompt[0] tokens, prompt[1] a step, each step TOKEN_SECONDS long."""

    def stream(self, prompt, **sampling):
        tokens: list[int] = []
        while len(tokens) < prompt[0]:
            time.sleep(TOKEN_SECONDS)
            tokens = [*tokens, *range(prompt[1])]
            yield {"output_ids": tokens, "meta_info": {"spec_verify_ct": len(tokens) // prompt[1]}}


def test_a_slow_last_request_does_not_stretch_the_timed_part():
    """Three places: two answers are short, one is ten times as long; the last prompt is sent when the first ends."""
    prompts = [(20, 1), (200, 1), (20, 1), (20, 1), (200, 1)]
    load = steady_load(SleepingServer(), prompts, 3)
    assert [len(answer.tokens) for answer in load.answers] == [20, 200, 20, 20, 200]
    whole = max(answer.times[-1] for answer in load.answers) - load.answers[0].times[0]
    assert load.seconds < 0.5 * whole
    assert load.produced < sum(len(answer.tokens) for answer in load.answers)


def test_the_timed_part_ends_when_a_place_stays_empty():
    """Seven equal prompts on four places: the first to end with none left ends it, before the last three are complete."""
    load = steady_load(SleepingServer(), [(60, 2)] * prompts_for(4), 4)
    assert [answer.steps for answer in load.answers] == [30] * 7
    sent = min(answer.times[0] for answer in load.answers)
    complete = sum(answer.times[-1] <= sent + load.seconds for answer in load.answers)
    assert 60 * complete <= load.produced < 60 * 7


def test_tokens_between_two_chunks_come_evenly():
    (answer,) = steady_load(SleepingServer(), [(10, 10)], 1).answers
    assert answer.counts == [0, 10]
    assert answer.count_at(sum(answer.times) / 2) == pytest.approx(5)
    assert answer.count_at(answer.times[0] - 1) == 0
    assert answer.count_at(answer.times[-1] + 1) == 10


def test_a_chunk_of_several_tokens_counts_as_so_many_gaps():
    """The first token's wait is no gap."""
    answer = Answer([1, 2, 3, 4], times=[0.0, 1.0, 1.5, 2.5], counts=[0, 1, 2, 4], steps=2)
    assert answer.gaps() == [0.5, 0.5, 0.5]
