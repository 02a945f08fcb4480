"""Sampled verification has plain decoding's distribution, and its very tokens when requests carry seeds.

The emitted tokens of a step are a prefix of what plain decoding would emit, so each possible outcome (an accepted path
and its bonus token) has the product of plain decoding's conditional probabilities. A G-test compares counts with it.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import power_divergence
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_patches.verification import target_sampling, verifier
from tests.unit.verification.plain_decoding import (
    Batch,
    RandomModel,
    Tree,
    emitted_tokens,
    layout_of,
    make_request,
    plain_distribution,
    plain_tokens,
    plain_tokens_of_batch,
    random_tree,
    sampler_on_cpu,
    tree_logits,
    verify,
    verify_input_of,
)

VOCAB = 8
COPIES, ROUNDS = 500, 16
REJECT = 1e-4  # draws are seeded, so a run that passes always passes

SETTINGS = {
    "temperature 1": dict(),
    "temperature 0.7": dict(temperature=0.7),
    "top-k": dict(temperature=1.3, top_k=4),
    "top-p": dict(top_p=0.8),
    "top-k and top-p": dict(top_k=5, top_p=0.7),
    "min-p": dict(min_p=0.15, temperature=1.5),
    "repetition penalty": dict(repetition_penalty=1.8),
    "penalties and top-p": dict(frequency_penalty=0.8, presence_penalty=0.5, top_p=0.9, temperature=0.7),
    "min_new_tokens and bias": dict(min_new_tokens=3, logit_bias={"1": 2.0}),
}


@pytest.fixture(scope="module")
def sampler():
    with sampler_on_cpu() as made:
        yield made


@pytest.fixture(scope="module")
def model():
    return RandomModel(VOCAB, seed=20, scale=1.0)


def draft(model, request):
    """Depth 3, likely tokens first, repeated tokens on a path so that penalties matter, one unlikely branch."""
    start = [*request.origin_input_ids, *request.output_ids]
    order = model(start).argsort(descending=True).tolist()
    a, b, c = order[:3]
    return Tree([start[-1], a, b, a, a, b, c, order[-1]], [None, 0, 0, 1, 3, 3, 2, 1])


def outcome_probabilities(model, sampler, tree, request, node=0):
    """{emitted tokens: probability} of one verification step under plain decoding."""
    path = tree.path(node)
    outcomes = {}
    for token, p in enumerate(plain_distribution(model, sampler, request, path)):
        child = next((c for c in tree.children(node) if tree.tokens[c] == token), None)
        if child is None:
            outcomes[*path, token] = p
        else:
            below = outcome_probabilities(model, sampler, tree, request, child)
            outcomes |= {tokens: p * q for tokens, q in below.items()}
    return outcomes


def count_outcomes(model, sampler, tree, request):
    torch.manual_seed(1)
    copies = [request] * COPIES
    verify_input = verify_input_of([tree] * COPIES, copies)
    layout = layout_of([tree] * COPIES, copies)
    logits = tree_logits(model, [tree], [request]).repeat(COPIES, 1)
    batch = Batch(copies, VOCAB)
    counts = {}
    for _ in range(ROUNDS):
        output = LogitsProcessorOutput(next_token_logits=logits.clone())
        result = verifier.TargetDraws(sampler).verify(verify_input, layout, batch, output)
        for tokens in emitted_tokens(*result):
            counts[tuple(tokens)] = counts.get(tuple(tokens), 0) + 1
    return counts


def g_test(counts, probabilities):
    """p-value that counts follow probabilities; cells expecting under five draws are pooled."""
    total = sum(counts.values())
    assert sum(probabilities.values()) == pytest.approx(1.0)
    impossible = [tokens for tokens in counts if probabilities.get(tokens, 0.0) == 0.0]
    if impossible:
        return 0.0
    rows = [(counts.get(tokens, 0), p * total) for tokens, p in probabilities.items() if p > 0]
    cells = [row for row in rows if row[1] >= 5]
    rest = np.sum([row for row in rows if row[1] < 5] or [(0, 0)], axis=0)
    observed, expected = np.array([*cells, rest] if rest[1] > 0 else cells).T
    return power_divergence(observed, expected, lambda_="log-likelihood").pvalue


def p_value(model, sampler, params):
    request = make_request(output=(5, 2), **params)
    tree = draft(model, request)
    return g_test(
        count_outcomes(model, sampler, tree, request), outcome_probabilities(model, sampler, tree, request)
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_outcomes_follow_plain_decoding(sampler, model, setting):
    assert p_value(model, sampler, SETTINGS[setting]) > REJECT


def test_g_test_notices_drafted_children_accepted_too_often(sampler, model, monkeypatch):
    honest = target_sampling.TargetSampler.sample
    tree = draft(model, make_request(output=(5, 2)))
    inner = [n for n in range(len(tree.tokens)) if tree.children(n)]
    drafted = {tuple(tree.path(n)): tree.tokens[tree.children(n)[0]] for n in inner}

    def biased(self, nodes):
        tokens = honest(self, nodes)
        coins = torch.rand(len(nodes)) < 0.1
        return [
            drafted.get(tuple(n.path), t) if c else t for c, n, t in zip(coins, nodes, tokens, strict=True)
        ]

    monkeypatch.setattr(target_sampling.TargetSampler, "sample", biased)
    assert p_value(model, sampler, SETTINGS["temperature 1"]) < 1e-6


def test_g_test_notices_penalties_that_ignore_the_drafted_path(sampler, model, monkeypatch):
    exact = verifier.penalise

    def pathless(logits, reqs, pending, layout):
        exact(logits, reqs, pending, dataclasses.replace(layout, mask=np.zeros_like(layout.mask)))

    monkeypatch.setattr(verifier, "penalise", pathless)
    assert p_value(model, sampler, SETTINGS["repetition penalty"]) < 1e-6


def murmur_hash32_reference(seed, positions, col_indices):
    """SGLang's murmur_hash32 for a CPU: 32-bit blocks seed low, seed high, position, column."""
    mask = 0xFFFFFFFF

    def mix(h, block):
        block = (block * 0xCC9E2D51) & mask
        block = ((block << 15) | (block >> 17)) & mask
        h = h ^ ((block * 0x1B873593) & mask)
        h = ((h << 13) | (h >> 19)) & mask
        return (h * 5 + 0xE6546B64) & mask

    seed = seed.to(torch.int64).numpy().astype(np.uint64)[:, None]
    column = col_indices.numpy().astype(np.uint64)[None]
    h = np.zeros((len(seed), 1), dtype=np.uint64)
    for block in (seed & mask, seed >> 32, positions.numpy().astype(np.uint64)[:, None], column):
        h = mix(h, block)
    h = h ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
    return torch.from_numpy((h ^ (h >> 16)).astype(np.uint32))


@pytest.mark.parametrize(
    "params", [dict(), dict(temperature=0.7, top_p=0.9), dict(repetition_penalty=1.5, top_k=6)]
)
def test_seeded_requests_emit_the_tokens_of_plain_decoding(params, monkeypatch):
    monkeypatch.setattr(sglang_sampler, "murmur_hash32", murmur_hash32_reference)
    with sampler_on_cpu(deterministic=True) as sampler:
        accepted = 0
        for trial in range(8):
            model = RandomModel(VOCAB, seed=trial)
            requests = [
                make_request(output=(5,) * n, sampling_seed=trial + 10 * n, **params) for n in (1, 2, 3)
            ]
            rng = np.random.default_rng(trial)
            trees = [random_tree(rng, model, r, 8) for r in requests]
            emitted, _ = verify(model, sampler, trees, requests)
            for request, tree, tokens in zip(requests, trees, emitted, strict=True):
                expected = plain_tokens(model, sampler, request, 8)
                assert tokens == expected[: tree.longest_match(expected) + 1]
                accepted += len(tokens) - 1
        assert accepted > 5


def test_seeded_requests_of_several_filters_emit_the_tokens_of_plain_decoding(monkeypatch):
    """Of the same batch: where one request filters, SGLang draws for all from sorted probabilities, of which a seed takes other tokens."""
    monkeypatch.setattr(sglang_sampler, "murmur_hash32", murmur_hash32_reference)
    kinds = [{}, dict(temperature=0.7, top_p=0.9), dict(temperature=1.3), dict(top_k=6)]
    with sampler_on_cpu(deterministic=True) as sampler:
        accepted = Counter()
        for trial in range(8):
            model, rng = RandomModel(VOCAB, seed=trial), np.random.default_rng(trial)
            requests = [
                make_request(output=(5,) * (n + 1), sampling_seed=trial + 10 * n, **kind)
                for n, kind in enumerate(kinds)
            ]
            texts = [[*request.origin_input_ids, *request.output_ids] for request in requests]
            expected = [[] for _ in requests]
            for _ in range(8):
                tokens = plain_tokens_of_batch(model, sampler, requests, texts)
                for text, said, token in zip(texts, expected, tokens, strict=True):
                    text.append(token)
                    said.append(token)
            trees = [random_tree(rng, model, request, 8) for request in requests]
            emitted, _ = verify(model, sampler, trees, requests)
            for n, (tree, tokens, said) in enumerate(zip(trees, emitted, expected, strict=True)):
                assert tokens == said[: tree.longest_match(said) + 1]
                accepted[n] += len(tokens) - 1
        assert all(accepted[n] > 0 for n in range(len(kinds)))
