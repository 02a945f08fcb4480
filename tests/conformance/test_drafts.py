"""The output does not depend on the draft: with pinned seeds it is the same, token for token, whatever drafts, and with nothing that
drafts. Every method with a draft process in this process (`workbench`); the draft that lies is a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
import statistics
import time

import psutil
import pytest
import torch

from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting import channel as channels
from sglang_patches.drafting.cache import DROPPED
from sglang_patches.drafting.channel import UP, ProcessChannel
from sglang_patches.drafting.datastore import DatastoreFallback
from sglang_patches.drafting.seams import Fallback, NoFallback, Patience
from sglang_patches.drafting.speculation import Speculation
from sglang_patches.exchange.trie import MOST_NODES
from sglang_patches.methods.registry import Method, Parts
from sglang_patches.verification.noise_verifier import SharedNoise
from tests.conformance.drafts import AGREEMENTS, LYING, draft_side
from tests.conformance.test_in_process import (
    REJECT,
    SAMPLED,
    VOCABULARY,
    _prompts,
    assert_filters_of_a_batch_with_seeds,
    p_value_of,
)
from tests.conformance.workbench import Markov, Scheduler, Workbench, plain_answer, request

DRAFTS = [*AGREEMENTS, LYING]
# How requests draw: one of each in a batch, and a greedy one among them.
WISHES = [
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 8, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {},
]
REASONS = ("epoch", "gap", "invalid", "parent", "replay", "session")  # for which growth is dropped
LIES = 20  # batches to find each of them in; a busy machine lets the liar say little
pytestmark = pytest.mark.draft_process
LAGS = pytest.mark.parametrize("lags", [True, False], ids=["overlap", "synchronous"])


@pytest.fixture(scope="session")
def model() -> Markov:
    return Markov(VOCABULARY, seed=3)


def pinned(method: Method, **others) -> Method:
    """The same method with seeds that are the same in every run, in the order in which requests come."""
    return dataclasses.replace(
        method, verifier=lambda sampler: SharedNoise(sampler, random.Random(7)), **others
    )


def alone(method: Method) -> Method:
    """With nothing that drafts."""
    return pinned(method, parts=lambda around: Parts(NoFallback()), draft_parts=None)


def with_datastore(method: Method) -> Method:
    """Without a draft process."""

    def parts(around) -> Parts:
        return Parts(DatastoreFallback(around.datastore, around.budget))

    return pinned(method, parts=parts, draft_parts=None)


def workbench_of(method: Method, model: Markov, draft: str, tokenizer) -> Workbench:
    return Workbench(method, tokenizer, functools.partial(draft_side, draft, model))


def sampled(scheduler: Scheduler, every_step=lambda: None) -> list[list[int]]:
    """Answers to two requests of each kind. The first token comes from SGLang's sampler, which draws with torch's generator."""
    torch.manual_seed(5)
    prompts = _prompts(2 * len(WISHES))
    reqs = [
        request(prompt, VOCABULARY, ignore_eos=True, **kind)
        for prompt, kind in zip(prompts, WISHES * 2, strict=True)
    ]
    return scheduler.answers(reqs, every_step)


@pytest.fixture(scope="module")
def expected(method, model, spelling_model) -> list[list[int]]:
    """Decoded a token at a time with the same noise."""
    with Workbench(alone(method), spelling_model).scheduler(model, lags=False, size=16) as scheduler:
        answers = sampled(scheduler)
        assert scheduler.tokens_per_step == 1
    assert len(set(map(tuple, answers))) == len(answers)
    return answers


@LAGS
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_output_does_not_depend_on_the_draft(method, model, spelling_model, expected, draft, lags):
    bench = workbench_of(pinned(method), model, draft, spelling_model)
    with bench.scheduler(model, lags=lags, size=16) as scheduler:
        assert sampled(scheduler) == expected
        assert scheduler.tokens_per_step > (2 if draft == "1" else 1.2)


@LAGS
def test_the_output_is_that_without_a_draft_process(method, model, spelling_model, expected, lags):
    with Workbench(with_datastore(method), spelling_model).scheduler(model, lags=lags, size=16) as scheduler:
        assert sampled(scheduler) == expected


def test_other_seeds_give_other_output(method, model, spelling_model, expected):
    other = dataclasses.replace(
        pinned(method), verifier=lambda sampler: SharedNoise(sampler, random.Random(8))
    )
    with workbench_of(other, model, "0.9", spelling_model).scheduler(model, lags=False, size=16) as scheduler:
        answers = sampled(scheduler)
    assert [a[0] for a in answers] == [e[0] for e in expected]
    greedy = [kind == {} for kind in WISHES * 2]
    assert [a == e for a, e in zip(answers, expected, strict=True)] == greedy


@LAGS
def test_the_output_does_not_depend_on_kills(method, model, spelling_model, expected, lags):
    """Of a draft side that is right: killed, gone for some steps, and back without memory, several times."""
    bench = workbench_of(pinned(method), model, "1", spelling_model)
    with bench.scheduler(model, lags=lags, size=16) as scheduler:
        side, steps = scheduler.worker.sources.channel, [0]

        def every_step() -> None:
            steps[0] += 1
            if steps[0] % 4 == 2:
                side.kill()
            elif steps[0] % 4 == 0:
                side.rise()

        assert sampled(scheduler, every_step) == expected
        assert steps[0] > 6 and scheduler.tokens_per_step > 1.2


def _lies(process: psutil.Process) -> bool:
    try:
        return LYING in process.cmdline()
    except psutil.NoSuchProcess:  # it has ended
        return False


def test_the_output_does_not_depend_on_the_death_of_a_liar(method, model, spelling_model, expected):
    """The process is killed in the middle, and the one that takes its place."""
    bench, killed = workbench_of(pinned(method), model, LYING, spelling_model), []
    with bench.scheduler(model, lags=True, size=16) as scheduler:
        steps = [0]

        def every_step() -> None:
            steps[0] += 1
            if steps[0] % 5 == 0 and UP._value.get():
                liars = [p for p in psutil.Process().children() if _lies(p)]
                killed.extend(liars)
                for process in liars:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

        assert sampled(scheduler, every_step) == expected
    assert killed


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(("setting", "lags"), [("temperature 1", True), ("temperature 0.7 and top-p", False)])
def test_requests_with_seeds_keep_plain_decodings_stream(
    method, model, spelling_model, draft, lags, setting, murmur_hash
):
    prompts = _prompts(4)
    kinds = [SAMPLED[setting] | {"sampling_seed": seed, "ignore_eos": True} for seed in range(4)]
    bench = workbench_of(method, model, draft, spelling_model)
    with bench.scheduler(model, lags=lags, seeded=True) as scheduler:
        asked = [request(p, VOCABULARY, **kind) for p, kind in zip(prompts, kinds, strict=True)]
        answers = scheduler.answers(asked)
    assert answers == [plain_answer(model, p, **kind) for p, kind in zip(prompts, kinds, strict=True)]


@pytest.mark.parametrize("draft", DRAFTS)
def test_requests_with_seeds_and_several_filters_in_one_batch(
    method, model, spelling_model, draft, murmur_hash
):
    assert_filters_of_a_batch_with_seeds(workbench_of(method, model, draft, spelling_model), model, lags=True)


@pytest.mark.parametrize(
    "draft", ["1", LYING, *(pytest.param(d, marks=pytest.mark.long) for d in ("0.9", "0.6", "0.3"))]
)
def test_sampled_output_has_plain_decodings_distribution(method, model, spelling_model, draft):
    bench = workbench_of(pinned(method), model, draft, spelling_model)
    assert p_value_of(bench, model, "top-k and min-p", lags=True) > REJECT


def test_a_liar_holds_nothing_up(method, model, spelling_model):
    """What it says is dropped and counted; work, waits and memory of a step are bounded."""
    before, seconds = {reason: DROPPED.labels(reason)._value.get() for reason in REASONS}, []
    bench = workbench_of(method, model, LYING, spelling_model)
    with bench.scheduler(model, lags=True, size=16) as scheduler:
        channel, speculation = scheduler.worker.sources.channel, scheduler.worker.sources.speculation
        assert isinstance(channel, ProcessChannel)
        waits = watch_waits(speculation, scheduler.worker.sources.fallback)
        sampled(scheduler)  # kernels are compiled
        last = [time.thread_time()]

        def every_step() -> None:
            seconds.append(time.thread_time() - last[0])
            with channel._changed:
                assert channel._answers._size <= channels.MOST
            assert all(len(trie) <= MOST_NODES for trie in speculation._cache._tries.values())
            last[0] = time.thread_time()

        for _ in range(LIES):
            sampled(scheduler, every_step)
            found = {reason: DROPPED.labels(reason)._value.get() - before[reason] for reason in REASONS}
            if all(found.values()):
                break
    assert all(found.values()), found
    assert statistics.median(seconds) < 0.2 and max(seconds) < 2.0, sorted(seconds)[-5:]
    assert waits and all(waited < granted + 3 * TICK for waited, granted in waits)


TICK = 1e-3


def watch_waits(speculation: Speculation, fallback: Fallback) -> list[tuple[float, float]]:
    """Of each look-up the seconds that it waited and those that it was granted, by a clock that goes on by a tick whenever it is read:
    a busy machine does not change them."""
    waits, granted = [], []
    look_up, patience = speculation.look_up, fallback.patience

    def noted(*arguments) -> Patience:
        granted.append(patience(*arguments))
        return granted[-1]

    def watched(states, depths, _) -> list[DraftTree]:
        trees = look_up(states, depths, noted)
        waits.append((speculation._waited, granted[-1].seconds))
        return trees

    speculation.look_up, speculation._now = watched, itertools.count(0.0, TICK).__next__
    speculation.seconds_waited = lambda: 0.0  # of another clock than the steps' times
    return waits
