"""The target draws with shared noise: its tokens do not depend on the draft, and have plain decoding's distribution."""

import gc
import random
import types

import numpy as np
import pytest
import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec, get_parallel

from sglang_patches.verification import noise_verifier, verifier
from sglang_patches.verification.noise_verifier import SharedNoise
from sglang_patches.verification.shared_noise import NO_NOISE, draw
from tests.unit.verification.plain_decoding import (
    Batch,
    RandomModel,
    Tree,
    emitted_tokens,
    layout_of,
    make_request,
    plain_distribution,
    plain_tokens,
    sampler_on_cpu,
    tree_logits,
    verify,
    verify_input_of,
)
from tests.unit.verification.test_verification_distribution import (
    REJECT,
    SETTINGS,
    VOCAB,
    draft,
    g_test,
    murmur_hash32_reference,
    outcome_probabilities,
)
from tests.unit.verification.test_verifier import (
    OnlyEvenTokens,
    grammar_mask,
    make_grammar,
    tree_kernel_on_cpu,
)

LARGE = 24  # a vocabulary for paths
GREEDY = dict(temperature=0.0)
COPIES, ROUNDS = 500, 8


@pytest.fixture(scope="module")
def sampler():
    with sampler_on_cpu() as made:
        yield made


@pytest.fixture(params=["walking", "all nodes"])
def strategy(request, monkeypatch):
    if request.param == "all nodes":
        monkeypatch.setattr(verifier, "_verify_walking", verifier._verify_all_nodes)
        monkeypatch.setattr(verifier, "verify_tree_greedy_func", tree_kernel_on_cpu)
    return request.param


def scheme_of(sampler, seed=0):
    """With seeds that are the same in every run."""
    return SharedNoise(sampler, random.Random(seed))


def noisy_tokens(model, sampler, scheme, request, count):
    """Plain decoding with the noise of the request's seed, one token at a time."""
    path, seed = [], scheme.seed_of(request)
    for _ in range(count):
        index = len(request.origin_input_ids) + len(request.output_ids) + len(path)
        p = torch.from_numpy(plain_distribution(model, sampler, request, path))[None]
        noise = torch.tensor([NO_NOISE if seed is None else seed]), torch.tensor([index])
        path.append(int(draw(p, *noise)))
        if request.grammar:
            request.grammar.accept_token(path[-1])
    if request.grammar:
        request.grammar.rollback(count)
    return path


# Exactness


@pytest.mark.parametrize("setting", SETTINGS)
def test_emits_what_plain_decoding_draws_with_the_same_noise(sampler, strategy, setting):
    rng, scheme, accepted = np.random.default_rng(0), scheme_of(sampler), 0
    for trial in range(4):
        model = RandomModel(LARGE, seed=trial, scale=1.5)
        params = [SETTINGS[setting], SETTINGS[setting], {}, GREEDY | dict(frequency_penalty=0.7)]
        requests = [make_request(output=rng.integers(0, LARGE, 3).tolist(), **p) for p in params]
        expected = [noisy_tokens(model, sampler, scheme, r, 7) for r in requests]
        trees = [tree_along(rng, tokens, r) for tokens, r in zip(expected, requests, strict=True)]
        emitted, _ = verify(model, scheme, trees, requests)
        for tree, tokens, want in zip(trees, emitted, expected, strict=True):
            assert tokens == want[: tree.longest_match(want) + 1]
            accepted += len(tokens) - 1
    assert accepted > 30


def tree_along(rng, tokens, request):
    """Some of the tokens in a row, and random ones beside them."""
    tree, node = Tree([request.output_ids[-1]], [None]), 0
    for token in tokens[: rng.integers(1, len(tokens))]:
        tree.tokens += [int(rng.integers(LARGE)), token]
        tree.parents += [node, node]
        node = len(tree.tokens) - 1
    return tree


@pytest.mark.usefixtures("grammars_on_a_cpu")
def test_grammars_and_custom_processors_constrain_the_draw(sampler, strategy):
    model, scheme = RandomModel(LARGE, seed=3, scale=1.0), scheme_of(sampler)
    requests = [
        make_request(grammar=make_grammar("[c-x]+")),
        make_request(processor=OnlyEvenTokens.to_str()),
        make_request(),
    ]
    expected = [noisy_tokens(model, sampler, scheme, r, 4) for r in requests]
    assert any(token % 2 for token in expected[2])
    trees = [Tree([5, *tokens], [None, 0, 1, 2, 3]) for tokens in expected]
    emitted, _ = verify(model, scheme, trees, requests, grammar_mask=grammar_mask(trees, requests))
    assert [len(tokens) for tokens in emitted] == [
        5,
        1,
        5,
    ]  # a custom processor is asked about the root alone
    assert [tokens[:4] for tokens in emitted] == [expected[0], expected[1][:1], expected[2]]
    assert min(emitted[0]) >= 2 and emitted[1][0] % 2 == 0


# The draft is without influence


def decode(model, sampler, params, drafted, tokens=30):
    """Texts of requests with these parameters, decoded with `drafted(request, text to come)` as trees, and the steps it took."""
    requests = [make_request(prompt=(3, 4, i), output=(5,), **p) for i, p in enumerate(params)]
    scheme, steps = scheme_of(sampler), 0
    foreseen = [noisy_tokens(model, sampler, scheme, r, tokens + 6) for r in requests]
    while min(len(r.output_ids) for r in requests) < tokens:
        steps += 1
        trees = [drafted(r, f[len(r.output_ids) - 1 :]) for r, f in zip(requests, foreseen, strict=True)]
        emitted, _ = verify(model, scheme, trees, requests)
        for request, new in zip(requests, emitted, strict=True):
            request.output_ids += new
    return [r.output_ids[1:tokens] for r in requests], steps


def nothing(request, to_come):
    return Tree([request.output_ids[-1]], [None])


def right(request, to_come):
    tree = nothing(request, to_come)
    return Tree([*tree.tokens, *to_come[:3]], [None, 0, 1, 2][: len(to_come[:3]) + 1])


def lying(request, to_come):
    wrong = [(token + 1) % LARGE for token in to_come[:3]]
    return Tree([request.output_ids[-1], *wrong, *wrong], [None, 0, 1, 2, 0, 4, 5][: 2 * len(wrong) + 1])


def random_one(request, to_come):
    rng = np.random.default_rng(len(request.output_ids))
    return Tree([request.output_ids[-1], *rng.integers(0, LARGE, 7).tolist()], [None, 0, 0, 1, 2, 2, 3, 1])


def test_the_emitted_tokens_do_not_depend_on_the_draft(sampler, strategy):
    model = RandomModel(LARGE, seed=4, scale=1.5)
    params = [{}, dict(top_p=0.9, temperature=0.8), dict(repetition_penalty=1.4, min_p=0.02), dict(top_k=7)]
    (plain, most), *others = (decode(model, sampler, params, d) for d in (nothing, right, lying, random_one))
    assert all(text == plain for text, _ in others)
    steps = [steps for _, steps in others]
    assert steps[0] <= most / 3 and steps[1] == most and most == 30 - 1
    assert len({tuple(text) for text in plain}) == len(params)


# The distribution


def copies_of(params):
    """Requests alike, each with a seed of its own."""
    return [make_request(output=(5, 2), **params) for _ in range(COPIES)]


def count_outcomes(model, sampler, tree, params):
    counts, scheme = {}, scheme_of(sampler, seed=1)
    for _ in range(ROUNDS):
        copies = copies_of(params)
        logits = tree_logits(model, [tree], copies[:1]).repeat(COPIES, 1)
        inputs = verify_input_of([tree] * COPIES, copies), layout_of([tree] * COPIES, copies)
        output = LogitsProcessorOutput(next_token_logits=logits)
        for tokens in emitted_tokens(*scheme.verify(*inputs, Batch(copies, VOCAB), output)):
            counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    return counts


def p_value(sampler, setting):
    model, request = RandomModel(VOCAB, seed=20, scale=1.0), make_request(output=(5, 2), **SETTINGS[setting])
    tree = draft(model, request)
    counts = count_outcomes(model, sampler, tree, SETTINGS[setting])
    return g_test(counts, outcome_probabilities(model, sampler, tree, request))


@pytest.mark.parametrize("setting", SETTINGS)
def test_outcomes_follow_plain_decoding(sampler, setting):
    assert p_value(sampler, setting) > REJECT


def lower_ids_more_often(probabilities, seeds, positions):
    return draw(probabilities * torch.linspace(1.5, 1.0, VOCAB), seeds, positions)


def of_one_position(probabilities, seeds, positions):
    return draw(probabilities, seeds, torch.zeros_like(positions))


def of_one_seed(probabilities, seeds, positions):
    return draw(probabilities, torch.zeros_like(seeds), positions)


@pytest.mark.parametrize("biased", [lower_ids_more_often, of_one_position, of_one_seed])
def test_g_test_notices_a_biased_draw(sampler, monkeypatch, biased):
    monkeypatch.setattr(noise_verifier, "draw", biased)
    assert p_value(sampler, "temperature 1") < 1e-6


# Seeds


def test_a_request_keeps_its_seed_and_another_has_another(sampler):
    scheme = SharedNoise(sampler)
    request = make_request()
    seed = scheme.seed_of(request)
    request.output_ids.append(7)
    assert scheme.seed_of(request) == seed and 0 <= seed < 2**63
    assert len({scheme.seed_of(r) for r in [make_request() for _ in range(100)]} | {seed}) == 101
    assert SharedNoise(sampler).seed_of(request) != seed
    del request
    gc.collect()
    assert len(scheme._seeds) == 0


def test_a_retracted_step_is_drawn_again_alike(sampler):
    model, scheme, request = RandomModel(LARGE, seed=2, scale=1.0), scheme_of(sampler), make_request()
    first, _ = verify(model, scheme, [nothing(request, [])], [request])
    others = [make_request() for _ in range(3)]
    again, _ = verify(model, scheme, [nothing(r, []) for r in [*others, request]], [*others, request])
    assert again[3] == first[0]


def test_greedy_requests_and_those_with_a_heeded_seed_have_no_noise():
    with sampler_on_cpu() as sampler:
        scheme = SharedNoise(sampler)
        assert scheme.seed_of(make_request(**GREEDY)) is None
        assert scheme.seed_of(make_request(sampling_seed=3)) is not None  # SGLang ignores it
        assert verifier.TargetDraws(sampler).seed_of(make_request()) is None
    with sampler_on_cpu(deterministic=True) as sampler:
        scheme = SharedNoise(sampler)
        assert scheme.seed_of(make_request(sampling_seed=3)) is None
        assert scheme.seed_of(make_request()) == scheme.seed_of(make_request()) == 42


# Whether a request beside them filters decides how SGLang reads a seed. A greedy one does, by top-k.
@pytest.mark.parametrize(
    ("params", "beside"),
    [
        ({}, [{}]),
        (dict(temperature=0.7, top_p=0.9), [{}, GREEDY]),
        (dict(top_k=6), [GREEDY, dict(top_p=0.5)]),
    ],
)
def test_seeded_requests_keep_plain_decodings_stream_beside_others(params, beside, strategy, monkeypatch):
    monkeypatch.setattr(sglang_sampler, "murmur_hash32", murmur_hash32_reference)
    with sampler_on_cpu(deterministic=True) as sampler:
        scheme, rng, accepted = SharedNoise(sampler), np.random.default_rng(0), 0
        for trial in range(6):
            model = RandomModel(LARGE, seed=trial)
            seeded = [make_request(output=(5,) * n, sampling_seed=trial * n, **params) for n in (1, 2)]
            others = [make_request(output=(6,), **p) for p in beside]
            expected = [plain_tokens(model, sampler, r, 8) for r in seeded]
            noisy = [noisy_tokens(model, sampler, scheme, r, 8) for r in others]
            requests = [*seeded, *others]
            trees = [tree_along(rng, t, r) for t, r in zip(expected + noisy, requests, strict=True)]
            emitted, _ = verify(model, scheme, trees, requests)
            stock, _ = verify(model, verifier.TargetDraws(sampler), trees, requests)
            assert emitted[:2] == stock[:2]
            for tree, tokens, want in zip(trees, emitted, expected + noisy, strict=True):
                assert tokens == want[: tree.longest_match(want) + 1]
                accepted += len(tokens) - 1
        assert accepted > 40


def test_ranks_draw_with_the_first_ranks_seeds(sampler, monkeypatch):
    """Two ranks, one after the other; a broadcast hands the second what the first one had."""

    class Group:
        world_size, first, sent = 2, True, []

        def broadcast(self, tensor, src):
            self.sent.append(tensor.clone()) if self.first else tensor.copy_(self.sent.pop(0))

    group, drawn, walk = Group(), [], verifier._verify_walking
    monkeypatch.setattr(verifier, "get_parallel", lambda: types.SimpleNamespace(tp_group=group))

    def noted(*step):
        result = walk(*step)
        drawn.append(result[0].clone())  # what is broadcast overwrites it
        return result

    monkeypatch.setattr(verifier, "_verify_walking", noted)
    model, requests = RandomModel(LARGE, seed=1, scale=1.0), [make_request() for _ in range(8)]
    schemes = [scheme_of(sampler, seed) for seed in (1, 2)]
    for scheme in schemes:
        verify(model, scheme, [nothing(r, []) for r in requests], requests)
        group.first = False
    assert torch.equal(*drawn) and group.sent == []
    assert schemes[0].seed_of(requests[0]) != schemes[1].seed_of(requests[0])


def test_a_sampler_that_draws_for_itself_shares_no_noise(sampler, caplog):
    class Own(Sampler):
        def forward(self, *step, **named):
            return super().forward(*step, **named)

    with get_parallel().override(tp_group=types.SimpleNamespace(device_group=None, world_size=1)):
        scheme = SharedNoise(Own())
    assert scheme.seed_of(make_request()) is None
    assert "Own draws tokens itself" in caplog.text


@pytest.mark.parametrize(("backend", "kernels"), [("pytorch", False), ("flashinfer", True)])
def test_filters_are_those_of_the_sampling_backend(sampler, monkeypatch, backend, kernels):
    found = []
    exact = noise_verifier.keep_filtered

    def noted(*filters, flashinfer, **named):
        found.append(flashinfer)
        return exact(*filters, flashinfer=flashinfer, **named)

    monkeypatch.setattr(noise_verifier, "keep_filtered", noted)
    with get_exec().kernel.override(sampling_backend=backend):
        scheme, request = scheme_of(sampler), make_request(top_p=0.8)
        verify(RandomModel(LARGE), scheme, [nothing(request, [])], [request])
    assert found == [kernels]
