"""Every method's real worker over a small model of its surroundings (`workbench`): no server is started."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import norm, power_divergence
from sglang.srt.managers.schedule_batch import Req

from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Reply
from sglang_patches.ledger.requests import USAGE
from tests.conformance.drafts import LYING, start_liar
from tests.conformance.workbench import (
    CONTEXT,
    DEADLINE_MS,
    Counting,
    Markov,
    Workbench,
    output_of,
    plain_answer,
    plain_answers,
    request,
)
from tests.unit.verification.plain_decoding import make_request, plain_distribution, sampler_on_cpu
from tests.waiting import eventually

VOCABULARY = 12
GREEDY = {
    "plain": {"ignore_eos": True},
    "repetition penalty": {"repetition_penalty": 1.3},
    "frequency and presence penalty": {"frequency_penalty": 0.3, "presence_penalty": 0.4},
    "min_new_tokens and bias": {"min_new_tokens": 20, "logit_bias": {"1": 1.5}},
    "stop token": {"stop_token_ids": [4, 7]},
}
SAMPLED = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7 and top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k and min-p": {"temperature": 1.0, "top_k": 5, "min_p": 0.05},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "frequency and presence penalty": {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": 0.4},
}
# Each setting once; what a step that lags has pending counts for the penalties.
COUNTED = [
    pytest.param("temperature 1", True, id="temperature 1, overlap"),
    pytest.param("temperature 1", False, id="temperature 1, synchronous"),
    pytest.param("temperature 0.7 and top-p", False, id="temperature 0.7 and top-p, synchronous"),
    pytest.param("top-k and min-p", True, id="top-k and min-p, overlap"),
    pytest.param("repetition penalty", True, id="repetition penalty, overlap"),
    pytest.param("frequency and presence penalty", True, id="frequency and presence penalty, overlap"),
]
SAMPLES, CONTINUATION = 1440, 3
COUNTING = {"max_new_tokens": CONTINUATION, "ignore_eos": True}
LONG = {"max_new_tokens": 80, "ignore_eos": True}
REJECT = 1e-4  # draws are seeded: what passes once always passes


@pytest.fixture
def workbench(method, spelling_model, draft) -> Workbench:
    return Workbench(method, spelling_model, *([start_liar] if draft == LYING else []))


@pytest.fixture(params=["overlap", "synchronous"])
def lags(request) -> bool:
    return request.param == "overlap"


@pytest.fixture(scope="session")
def model() -> Markov:
    return Markov(VOCABULARY, seed=3)


def _prompts(count: int, length: int = 20) -> list[list[int]]:
    """They repeat themselves, so that there is something to draft."""
    draw = random.Random(count)
    phrases = [draw.choices(range(2, VOCABULARY), k=6) for _ in range(count)]
    return [(phrase * length)[:length] for phrase in phrases]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("setting", GREEDY)
def test_greedy_output_is_plain_decodings(workbench, model, lags, setting, batch):
    prompts = _prompts(batch)
    with workbench.scheduler(model, lags=lags) as scheduler:
        answers = scheduler.answers([request(p, VOCABULARY, **GREEDY[setting]) for p in prompts])
    assert answers == [plain_answer(model, p, **GREEDY[setting]) for p in prompts]
    assert scheduler.target.drafted > 0, "no draft was verified, equality would show nothing"
    if setting == "plain":
        assert scheduler.tokens_per_step > 1.2


def any_share(trees: Sequence[DraftTree], tenants: Sequence[str]) -> np.ndarray:
    """Rows by request, as a policy might choose them: of each tree some nodes, none or all of them."""
    draw = np.random.default_rng([len(trees), *map(len, trees)])
    return 1 + draw.integers(0, [len(tree) + 1 for tree in trees])


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("share", [False, True], ids=["equal rows", "rows by request"])
def test_requests_of_all_kinds_in_one_batch(workbench, model, lags, late, share):
    kinds = [*GREEDY.values(), {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"ignore_eos": True}] * 2
    prompts = _prompts(len(kinds))
    noise = [request(p, VOCABULARY, temperature=1.0) for p in prompts[:4]]
    with workbench.scheduler(model, lags=lags, size=12, late=late) as scheduler:
        if share:
            scheduler.worker.policy.choose = any_share
        asked = [request(p, VOCABULARY, **kind) for p, kind in zip(prompts, kinds, strict=True)]
        answers = scheduler.answers([*noise, *asked])[len(noise) :]
    assert answers == [plain_answer(model, p, **kind) for p, kind in zip(prompts, kinds, strict=True)]
    assert share or [kind for kind, req in zip(kinds, asked, strict=True) if not _was_drafted_for(req)] == []


def _was_drafted_for(req: Req) -> bool:
    """Whether a draft was verified for it, or it had at most one step: the first token comes from the prefill."""
    said = len(output_of(req))
    return said <= 2 or bool(getattr(req, USAGE).summary(said)["drafted"])


@pytest.mark.parametrize("share", [False, True], ids=["equal rows", "rows by request"])
def test_a_request_says_how_much_is_drafted_for_it(workbench, model, lags, share):
    wishes = [{"draft": False}, {"nodes": 0}, {"nodes": 2}, {"draft": True, "nodes": 1000}, {}]
    prompts = _prompts(len(wishes))
    asked = [
        request(prompt, VOCABULARY, custom_params={"specstore": wish}, **LONG)
        for prompt, wish in zip(prompts, wishes, strict=True)
    ]
    with workbench.scheduler(model, lags=lags) as scheduler:
        if share:
            scheduler.worker.policy.choose = any_share
        answers = scheduler.answers(asked)
    assert answers == [plain_answer(model, prompt, **LONG) for prompt in prompts]
    told = [getattr(req, USAGE).summary(len(output_of(req))) for req in asked]
    drafted = [sum(of["drafted"].values()) for of in told]
    assert drafted[:2] == [0, 0] and 0 < drafted[2] <= 2 * told[2]["steps"]
    assert min(drafted[3:]) > drafted[2]


@pytest.mark.parametrize("nodes", [1, 31, 63])
def test_any_width(workbench, model, lags, nodes):
    prompts = _prompts(4)
    with workbench.scheduler(model, lags=lags, nodes=nodes) as scheduler:
        answers = scheduler.answers([request(p, VOCABULARY) for p in prompts])
        assert 0 < scheduler.target.drafted <= nodes * scheduler.steps
    assert answers == [plain_answer(model, p) for p in prompts]


def test_prompts_of_a_few_tokens(workbench, model, lags):
    prompts = [[token] * length for length in (1, 2, 3) for token in (2, 5)]
    with workbench.scheduler(model, lags=lags) as scheduler:
        answers = scheduler.answers([request(p, VOCABULARY, max_new_tokens=12) for p in prompts])
    assert answers == [plain_answer(model, p, max_new_tokens=12) for p in prompts]


def test_every_distance_from_the_context_limit(workbench, model, lags):
    nodes, end = 15, CONTEXT - 2  # SGLang keeps two tokens of the context free
    lengths = list(range(1, 2 * nodes))
    prompts = [_prompts(1, end - length)[0] for length in lengths]
    with workbench.scheduler(model, lags=lags, nodes=nodes, size=16) as scheduler:
        asked = [
            request(p, VOCABULARY, max_new_tokens=n, ignore_eos=True)
            for p, n in zip(prompts, lengths, strict=True)
        ]
        answers = scheduler.answers(asked)
    pairs = zip(prompts, lengths, strict=True)
    assert answers == [plain_answer(model, p, max_new_tokens=n, ignore_eos=True) for p, n in pairs]


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_sglang_takes_back(workbench, model, lags, late, seed):
    """Requests are retracted, with what they have said if they have `input_embeds`; aborted; and asked again under the name of one that
    still runs, whose end is told then or later. The workbench checks every root."""
    draw, happened = random.Random(seed), Counter()
    asked = [request(p, VOCABULARY, **LONG) for p in _prompts(6)]
    for req in asked[::2]:
        req.input_embeds = []
    replaced: list[Req] = []

    with workbench.scheduler(model, lags=lags, late=late) as scheduler:
        if seed:
            scheduler.worker.policy.choose = any_share

        def meddle() -> None:
            if replaced and draw.random() < 0.3:
                gone = replaced.pop()
                if gone in scheduler.running:
                    scheduler.abort(gone)
            free = [place for place, req in enumerate(scheduler.running) if req in asked]
            if not free:
                return
            place = draw.choice(free)
            req = scheduler.running[place]
            if draw.random() < 0.5 and happened["retracted", req] < 3:
                happened["retracted", req] += 1
                happened[
                    "emptied" if len(req.output_ids) > 2 and req.input_embeds is not None else "kept"
                ] += 1
                scheduler.retract(place)
            elif happened["replaced"] < 4 and draw.random() < 0.5:
                again = request(draw.choice(_prompts(6)), VOCABULARY, **LONG)
                again.input_embeds = req.input_embeds
                again.rid, asked[asked.index(req)] = req.rid, again
                scheduler.add(again)
                replaced.append(req)
                happened["replaced"] += 1

        scheduler.answers(list(asked), meddle)
        book = scheduler.worker.book
    assert min(happened[what] for what in ("emptied", "kept", "replaced")) > 1
    expected = [plain_answer(model, list(req.origin_input_ids), **LONG) for req in asked]
    assert [output_of(req) for req in asked] == expected
    assert len(book) == 0 and not scheduler.worker.sources.feed._sent


def test_a_flush_forgets_the_sessions_and_nothing_else(workbench, model, lags, datastore):
    prompts = _prompts(3)
    with workbench.scheduler(model, lags=lags, endpoint=datastore.endpoint, tenant="flush") as scheduler:
        asked = [request(p, VOCABULARY, ignore_eos=True) for p in prompts]
        steps = itertools.count()
        answers = scheduler.answers(
            asked, lambda: scheduler.worker.clear_cache_pool() if next(steps) == 4 else None
        )
        assert answers == [plain_answer(model, p, ignore_eos=True) for p in prompts]
        one = request(prompts[0], VOCABULARY, max_new_tokens=1)
        assert scheduler.answers([one]) == [answers[0][:1]]
        eventually(lambda: datastore.sessions() == 0, "sessions are left", 60)


@pytest.mark.parametrize("kind", ["overlap", "synchronous", "overlap with a grammar"])
def test_no_request_leaves_a_session(workbench, model, datastore, kind):
    wanted = [*GREEDY.values(), {"max_new_tokens": 1}, {"max_new_tokens": 2}]
    asked = [request(p, VOCABULARY, **w) for p, w in zip(_prompts(len(wanted)), wanted, strict=True)]
    with workbench.scheduler(model, lags=kind != "synchronous", endpoint=datastore.endpoint) as scheduler:
        scheduler.with_grammar = kind == "overlap with a grammar"
        scheduler.answers(asked)
        eventually(lambda: datastore.sessions() == 0, "sessions are left", 60)


def test_every_wait_for_the_datastore_has_the_deadline_of_the_option(workbench, model, monkeypatch):
    """The worker's, and the draft side's own."""
    step, deadlines = EmbeddedDatastore.step, set()

    def noted(self, entries, deadline) -> list[Reply]:
        deadlines.add(deadline)
        return step(self, entries, deadline)

    monkeypatch.setattr(EmbeddedDatastore, "step", noted)
    with workbench.scheduler(model, lags=True) as scheduler:
        scheduler.answers([request(p, VOCABULARY) for p in _prompts(2)])
    assert deadlines == {float(DEADLINE_MS) / 1e3}


def test_the_datastore_hears_all_but_the_text_of_requests_that_want_no_draft(workbench, model, lags):
    """With adaptive length, as the policy drafts and does not by turns: of each verified draft and each request that begins again, and
    nothing else."""
    steps, heard = itertools.count(1), []
    asked = [request(p, VOCABULARY, **LONG) for p in _prompts(4)]
    asked[0].input_embeds = []  # loses what it has said when it is retracted
    with workbench.scheduler(model, lags=lags, adaptive=True) as scheduler:
        worker, wants = scheduler.worker, [True]
        step = worker.sources.feed.step
        worker.policy.wants_draft = lambda batch: wants[0]
        worker.policy.choose = lambda trees, tenants: np.full(
            len(trees), worker.max_width if any(map(len, trees)) else 1
        )

        def noted(states, budgets) -> list[DraftTree]:
            heard.append(wants[0])
            return step(states, budgets)

        def every_step() -> None:
            if not wants[0]:
                running = [state for state in worker.book._of_step if state.req in scheduler.running]
                assert not worker.sources.feed.has_news(running)
            number = next(steps)
            wants[0] = number % 6 < 3
            if number == 4:
                scheduler.retract(scheduler.running.index(asked[0]))

        worker.sources.feed.step = noted
        answers = scheduler.answers(asked, every_step)
    assert answers == [plain_answer(model, list(req.origin_input_ids), **LONG) for req in asked]
    # Once a turn without drafts, and of the request that begins again.
    assert 2 < heard.count(False) <= next(steps) // 6 + 1


def test_text_is_drafted_for_its_own_tenant_alone(method, workbench, lags, datastore, draft):
    """The target counts upwards: a draft can only come from who has read the same."""
    model, steps = Counting(512), {}
    draw = random.Random(int(lags))
    start = draw.randrange(100, 200)

    def ask(tenant: str, publish: bool) -> int:
        wishes = {"specstore": {"publish": publish}}
        with workbench.scheduler(model, lags=lags, endpoint=datastore.endpoint, tenant=tenant) as scheduler:
            req = request([start - 1, start], 512, max_new_tokens=60, custom_params=wishes)
            assert scheduler.answers([req]) == [list(range(start + 1, start + 61))]
            eventually(lambda: datastore.sessions() == 0, "its session is left", 60)
            return scheduler.steps

    mine, other = f"{method.name}-mine-{lags}", f"{method.name}-other-{lags}"
    steps["other before"] = ask(other, publish=False)
    steps["mine"] = ask(mine, publish=True)
    steps["mine again"] = ask(mine, publish=False)
    steps["other after"] = ask(other, publish=False)
    assert steps["mine again"] < steps["mine"] / 2, (
        "what a tenant has said is not drafted for it: this shows nothing"
    )
    if draft == LYING:  # what it says may be right by chance
        assert steps["other after"] > 0.9 * steps["other before"], steps
    else:
        assert steps["other after"] == steps["other before"], steps


@pytest.mark.parametrize("embedded", [True, False], ids=["embedded", "gRPC"])
def test_text_is_drafted_for_its_own_tenant_alone_in_one_worker(
    method, workbench, lags, datastore, draft, embedded
):
    """Requests name their tenants, and stand in one batch."""
    model, start = Counting(512), 100 + 50 * lags
    name = f"{method.name}-{lags}-{embedded}"
    own, endpoint = f"{name}-own", "embedded" if embedded else datastore.endpoint

    def asking(tenant: str, publish: bool, conversation: str = "talk") -> Req:
        wishes = {"tenant": tenant, "publish": publish, "conversation": conversation}
        params = {"max_new_tokens": 60, "custom_params": {"specstore": wishes}}
        return request([start - 1, start], 512, **params)

    how = {"endpoint": endpoint, "tenant": name, "request_tenant": "custom_params"}
    with workbench.scheduler(model, lags=lags, **how) as scheduler:

        def steps(*reqs: Req) -> list[int]:
            assert scheduler.answers(reqs) == [list(range(start + 1, start + 61))] * len(reqs)
            eventually(lambda: embedded or datastore.sessions() == 0, "a session is left", 60)
            return [getattr(req, USAGE).summary(60)["steps"] for req in reqs]

        (before,) = steps(asking(f"{name}-first", publish=False))
        (said,) = steps(asking(own, publish=True))
        again, *others = steps(
            asking(own, publish=False, conversation=""),
            asking(f"{name}-second", publish=False),
            asking("", publish=False),
        )
    assert again < said / 2, "what a tenant has said is not drafted for it: this shows nothing"
    # What a draft model says comes sooner or later, or is right by chance.
    least = before if not method.draft_process else 0.8 * before
    assert all(least <= other <= before for other in others), (before, others)


@pytest.mark.parametrize(("setting", "lags"), COUNTED)
def test_sampled_output_has_plain_decodings_distribution(workbench, model, setting, lags):
    assert p_value_of(workbench, model, setting, lags) > REJECT


def p_value_of(workbench: Workbench, model: Markov, setting: str, lags: bool, **wanted: object) -> float:
    """That sampled output has plain decoding's distribution: counted over many requests with one prompt, 48 at a time."""
    (prompt,) = _prompts(1, 40)
    torch.manual_seed(1)
    pinned = mock.patch("random.SystemRandom", lambda: random.Random(7))  # seeds of shared noise
    with pinned, workbench.scheduler(model, lags=lags, size=48) as scheduler:
        params = SAMPLED[setting] | COUNTING | wanted
        answers = scheduler.answers([request(prompt, VOCABULARY, **params) for _ in range(SAMPLES)])
        assert scheduler.tokens_per_step > 1.05, "nothing was accepted, the test would show nothing"
    return _p_value(Counter(map(tuple, answers)), _expected(model, setting))


@functools.cache  # the same for every method
def _expected(model: Markov, setting: str) -> dict[tuple[int, ...], float]:
    with sampler_on_cpu() as sampler:
        req = make_request(*_prompts(1, 40), (), **SAMPLED[setting] | COUNTING)
        return _probabilities(model, sampler, req, ())


def _probabilities(model, sampler, req, path: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """{continuation: probability} under plain decoding."""
    if len(path) == CONTINUATION:
        return {path: 1.0}
    return {
        rest: p * q
        for token, p in enumerate(plain_distribution(model, sampler, req, path))
        if p > 0
        for rest, q in _probabilities(model, sampler, req, (*path, token)).items()
    }


def _p_value(found: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """The smaller one of two tests', times two for the choice: any difference shows in the counts, noise that is too small or too
    large and drafts that are accepted too easily sooner in the mean surprise."""
    assert sum(expected.values()) == pytest.approx(1.0)
    if found.keys() - expected.keys():
        return 0.0
    return min(1.0, 2 * min(_of_counts(found, expected), _of_surprise(found, expected)))


def _of_counts(found: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """A G-test; cells that expect fewer than five draws are one."""
    cells = [(found[outcome], p * SAMPLES) for outcome, p in expected.items()]
    many = [cell for cell in cells if cell[1] >= 5]
    assert len(many) > 5, "a few continuations take all, the test would show nothing"
    rest = np.sum([cell for cell in cells if cell[1] < 5], axis=0)
    observed, awaited = np.array([*many, rest]).T
    return power_divergence(observed, awaited, lambda_="log-likelihood").pvalue


def _of_surprise(found: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """A z-test of the mean of -log p."""
    chances = np.array(list(expected.values()))
    surprises, counts = -np.log(chances), np.array([found[outcome] for outcome in expected])
    mean = chances @ surprises
    deviation = np.sqrt(chances @ (surprises - mean) ** 2 / counts.sum())
    return float(2 * norm.sf(abs(counts @ surprises / counts.sum() - mean) / deviation))


@pytest.mark.parametrize("setting", ["temperature 1", "temperature 0.7 and top-p"])
def test_requests_with_seeds_get_plain_decodings_tokens(workbench, model, lags, setting, murmur_hash):
    prompts = _prompts(4)
    wanted = [SAMPLED[setting] | {"sampling_seed": seed, "ignore_eos": True} for seed in range(4)]
    expected = [plain_answer(model, p, **kind) for p, kind in zip(prompts, wanted, strict=True)]
    with workbench.scheduler(model, lags=lags, seeded=True) as scheduler:
        asked = [request(p, VOCABULARY, **kind) for p, kind in zip(prompts, wanted, strict=True)]
        answers = scheduler.answers(asked)
    assert answers == expected


# SGLang has no seeds with min-p. The last one filters, and speaks as long as any other: at most NODES + 1 tokens a step.
FILTERED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_k": 6, "top_p": 0.9, "max_new_tokens": 100},
]
NODES = 3


def test_requests_with_seeds_and_several_filters_in_one_batch(workbench, model, lags, murmur_hash):
    assert_filters_of_a_batch_with_seeds(workbench, model, lags)


def assert_filters_of_a_batch_with_seeds(workbench: Workbench, model: Markov, lags: bool) -> None:
    """Where one of a batch filters, SGLang draws for all of it from sorted probabilities, of which a seed takes other tokens."""
    prompts = _prompts(len(FILTERED), length=12)
    kinds = [
        {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": seed, **kind}
        for seed, kind in enumerate(FILTERED)
    ]
    assert kinds[-1]["max_new_tokens"] >= (NODES + 1) * kinds[0]["max_new_tokens"]
    with workbench.scheduler(model, lags=lags, nodes=NODES, seeded=True) as scheduler:
        asked = [request(p, VOCABULARY, **kind) for p, kind in zip(prompts, kinds, strict=True)]
        answers = scheduler.answers(asked)
        assert scheduler.tokens_per_step > 1.2
    assert answers == plain_answers(model, prompts, kinds)
