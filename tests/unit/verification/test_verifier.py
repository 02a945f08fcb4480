"""Exactness of tree verification, node by node, against plain decoding (`plain_decoding`)."""

import functools
import random

import numpy as np
import pytest
import torch
from packaging.version import Version
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from sglang_patches.cpu.tree_operators import verify_tree_greedy_cpu
from sglang_patches.host.versions import INSTALLED
from sglang_patches.verification import verifier
from sglang_patches.verification.noise_verifier import SharedNoise
from sglang_patches.verification.target_sampling import needs_plain_step
from tests.unit.verification.plain_decoding import (
    EOS,
    Batch,
    RandomModel,
    Tree,
    emitted_tokens,
    layout_of,
    make_request,
    plain_token,
    plain_tokens,
    random_tree,
    sampler_on_cpu,
    tree_logits,
    verify_input_of,
)
from tests.unit.verification.plain_decoding import verify as verify_trees

VOCAB = 24

GREEDY = dict(temperature=0.0)
FEATURES = {
    "plain": {},
    "repetition": dict(repetition_penalty=1.4),
    "frequency": dict(frequency_penalty=0.7),
    "presence": dict(presence_penalty=1.3),
    "all penalties": dict(repetition_penalty=0.8, frequency_penalty=-0.3, presence_penalty=0.9),
    "min_new_tokens": dict(min_new_tokens=4),
    "logit_bias": dict(logit_bias={"6": 3.0, "7": -2.0}),
    "bias and penalties": dict(logit_bias={str(EOS): 2.0}, min_new_tokens=3, frequency_penalty=1.1),
}


@pytest.fixture(scope="module")
def sampler():
    with sampler_on_cpu() as made:
        yield made


def tree_kernel_on_cpu(predicts, accept_index, accept_token_num, topk, **tree):
    links = {name.replace("retrieve", "retrive"): value for name, value in tree.items()}
    verify_tree_greedy_cpu(predicts, accept_index, accept_token_num, **links)
    return predicts, accept_index, accept_token_num


@pytest.fixture(params=["walking", "walking, rows by request", "all nodes"])
def strategy(request, monkeypatch):
    """The ways to verify; the one for devices runs here with the CPU's tree operator in the kernel's place."""
    if request.param == "all nodes":
        monkeypatch.setattr(verifier, "_verify_walking", verifier._verify_all_nodes)
        monkeypatch.setattr(verifier, "verify_tree_greedy_func", tree_kernel_on_cpu)
    return request.param


@pytest.fixture
def verify(strategy):
    return functools.partial(verify_trees, by_request="by request" in strategy)


def random_requests(rng, params):
    return [make_request(output=rng.integers(0, VOCAB, rng.integers(1, 9)).tolist(), **p) for p in params]


def assert_emits_plain_tokens(model, sampler, trees, requests, emitted):
    """Returns the number of accepted drafted tokens, all requests together."""
    for request, tree, tokens in zip(requests, trees, emitted, strict=True):
        expected = plain_tokens(model, sampler, request, len(tree.tokens))
        accepted = tree.longest_match(expected)
        assert tokens == expected[: accepted + 1]
    return sum(len(tokens) - 1 for tokens in emitted)


@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_equals_plain_decoding_on_random_ragged_trees(sampler, verify, feature):
    rng = np.random.default_rng(0)
    accepted = 0
    for trial in range(4):
        model = RandomModel(VOCAB, seed=trial)
        requests = random_requests(rng, [GREEDY | FEATURES[feature]] * 4)
        trees = [random_tree(rng, model, r, rng.integers(1, 10)) for r in requests]
        emitted, _ = verify(model, sampler, trees, requests)
        accepted += assert_emits_plain_tokens(model, sampler, trees, requests, emitted)
    assert accepted > 5  # the trees were worth drafting, so paths were tested, not only roots


def test_greedy_requests_of_different_features_share_a_batch(sampler, verify):
    rng = np.random.default_rng(1)
    model = RandomModel(VOCAB, seed=11)
    requests = random_requests(rng, [GREEDY | f for f in FEATURES.values()])
    trees = [random_tree(rng, model, r, 9) for r in requests]
    emitted, _ = verify(model, sampler, trees, requests)
    assert_emits_plain_tokens(model, sampler, trees, requests, emitted)


def test_greedy_request_beside_sampling_ones_stays_greedy(sampler, verify):
    rng = np.random.default_rng(2)
    model = RandomModel(VOCAB, seed=5)
    hot = dict(temperature=5.0)
    requests = random_requests(
        rng, [hot, GREEDY, hot | dict(top_p=0.9), GREEDY | dict(repetition_penalty=1.3)]
    )
    trees = [random_tree(rng, model, r, 8) for r in requests]
    for _ in range(10):
        emitted, _ = verify(model, sampler, trees, requests)
        greedy = [1, 3]
        picked = [[values[i] for i in greedy] for values in (trees, requests, emitted)]
        assert_emits_plain_tokens(model, sampler, *picked)


def test_penalties_count_accepted_tokens_that_are_still_pending(sampler, verify):
    rng = np.random.default_rng(3)
    model = RandomModel(VOCAB, seed=7)
    requests = [
        make_request(output=rng.integers(0, VOCAB, 14).tolist(), frequency_penalty=2.0, **GREEDY)
        for _ in range(6)
    ]
    trees = [random_tree(rng, model, r, 8) for r in requests]
    expected, _ = verify(model, sampler, trees, requests)
    verify_input, logits = verify_input_of(trees, requests), tree_logits(model, trees, requests)
    layout = layout_of(trees, requests)
    pending = [r.output_ids[1:] for r in requests]
    for request in requests:
        request.output_ids = request.output_ids[:1]

    def emitted(pending):
        output = LogitsProcessorOutput(next_token_logits=logits.clone())
        batch = Batch(requests, VOCAB)
        return emitted_tokens(
            *verifier.TargetDraws(sampler).verify(verify_input, layout, batch, output, pending=pending)
        )

    assert emitted(pending) == expected
    assert emitted(None) != expected


def test_shapes_and_types_are_those_the_scheduler_reads(sampler, strategy):
    model = RandomModel(VOCAB)
    requests = [make_request(**GREEDY) for _ in range(2)]
    best = plain_tokens(model, sampler, requests[0], 2)
    # Two siblings carry the accepted token: the first wins. Padding carries token 0 and is unlinked.
    trees = [Tree([5, best[0], best[0], best[1]], [None, 0, 0, 1]), Tree([5], [None])]
    batch = Batch(requests, VOCAB)
    output = LogitsProcessorOutput(next_token_logits=tree_logits(model, trees, requests))
    predict, accept_lens, accept_index = verifier.TargetDraws(sampler).verify(
        verify_input_of(trees, requests), layout_of(trees, requests), batch, output
    )
    assert (predict.dtype, accept_lens.dtype, accept_index.dtype) == (torch.int32,) * 3
    assert accept_lens.tolist() == [3, 1]
    assert accept_index.tolist() == [[0, 1, 3, -1], [4, -1, -1, -1]]
    assert predict[[0, 1, 4]].tolist() == [best[0], best[1], best[0]]
    assert predict.shape == (8,)


def test_padding_is_never_accepted(sampler, verify):
    model = RandomModel(VOCAB)
    request = make_request(logit_bias={"0": 100.0}, **GREEDY)
    emitted, _ = verify(model, sampler, [Tree([5], [None]).padded(4)], [request])
    assert emitted == [[0]]


def test_idle_batch_yields_nothing(sampler):
    batch = Batch([make_request()], VOCAB)
    batch.forward_mode = ForwardMode.IDLE
    output = LogitsProcessorOutput(next_token_logits=torch.empty(0, VOCAB))
    assert [t.numel() for t in verifier.TargetDraws(sampler).verify(None, None, batch, output)] == [
        0,
        0,
        0,
    ]


@pytest.mark.skipif(Version(INSTALLED) < Version("0.5.22"), reason="SGLang has no watermarks")
def test_watermark_is_refused(sampler):
    batch = Batch([make_request()], VOCAB)
    batch.sampling_info.has_watermark_candidates = True
    with pytest.raises(ValueError, match="watermark"):
        verifier.TargetDraws(sampler).verify(None, None, batch, LogitsProcessorOutput(torch.zeros(1, VOCAB)))


class OnlyEvenTokens(CustomLogitProcessor):
    calls = []

    def __call__(self, logits, custom_param_list=None):
        self.calls.append(len(logits))
        logits[:, 1::2] = float("-inf")
        return logits


def test_custom_logit_processor_is_asked_once_about_the_root_only(sampler, verify):
    model = RandomModel(VOCAB, seed=3)
    processor = OnlyEvenTokens.to_str()
    requests = [make_request(**GREEDY), make_request(processor=processor, **GREEDY), make_request(**GREEDY)]
    assert [needs_plain_step(r) for r in requests] == [None, "custom_logit_processor", None]
    calls = CustomLogitProcessor.from_str(processor).calls
    expected = [plain_tokens(model, sampler, r, 3) for r in requests]
    assert expected[1] != expected[0]
    calls.clear()
    trees = [Tree([5, *e], [None, 0, 1, 2]) for e in expected]
    emitted, _ = verify(model, sampler, trees, requests)
    assert [len(e) for e in emitted] == [4, 1, 4]
    assert [e[:3] for e in (emitted[0], emitted[2])] == [expected[0], expected[2]]
    assert emitted[1] == expected[1][:1]
    assert calls == [1]


@pytest.mark.parametrize("scheme", [verifier.TargetDraws, SharedNoise])
@pytest.mark.parametrize("params", [GREEDY, dict(temperature=0.7, top_k=3, repetition_penalty=1.3)])
def test_logprobs_are_those_plain_decoding_reports(sampler, verify, scheme, params):
    scheme = scheme(sampler)
    scheme._source = random.Random(0)
    model = RandomModel(VOCAB, seed=9)
    torch.manual_seed(0)
    ask = [dict(logprobs=(3, [2, 8])), dict(logprobs=(0, None)), dict(logprobs=(1, None))]
    requests = [make_request(**a, **params) for a in ask]
    trees = [bushy_tree(model, r) for r in requests]
    emitted, output = verify(model, scheme, trees, requests, return_logprob=True)
    width = output.next_token_logprobs.shape[1]
    assert output.next_token_logprobs.shape == (3, 13)
    assert max(len(tokens) for tokens in emitted) > 1
    for r, (request, tokens) in enumerate(zip(requests, emitted, strict=True)):
        for step, token in enumerate(tokens):
            _, plain = plain_token(model, sampler, request, tokens[:step], return_logprob=True)
            flat = r * width + step
            every = plain_logprobs(model, sampler, request, tokens[:step])
            assert output.next_token_logprobs[r, step].item() == pytest.approx(every[token], abs=1e-5)
            if request.top_logprobs_num:
                torch.testing.assert_close(
                    output.next_token_top_logprobs_val[flat], plain.next_token_top_logprobs_val[0]
                )
                assert torch.equal(
                    output.next_token_top_logprobs_idx[flat], plain.next_token_top_logprobs_idx[0]
                )
            if request.token_ids_logprob:
                torch.testing.assert_close(
                    output.next_token_token_ids_logprobs_val[flat], plain.next_token_token_ids_logprobs_val[0]
                )
                assert output.next_token_token_ids_logprobs_idx[flat] == [2, 8]


def bushy_tree(model, request):
    """The three likeliest tokens at each of two levels."""
    start = [*request.origin_input_ids, *request.output_ids]
    tree = Tree([start[-1]], [None])
    for parent in range(4):
        tree.tokens += model([*start, *tree.path(parent)]).topk(3).indices.tolist()
        tree.parents += [parent] * 3
    return tree


def plain_logprobs(model, sampler, request, path):
    """What plain decoding would report for each token of the vocabulary, were it drawn."""
    probe = make_request(request.origin_input_ids, request.output_ids, logprobs=(0, list(range(VOCAB))))
    probe.sampling_params = request.sampling_params
    _, output = plain_token(model, sampler, probe, path, return_logprob=True)
    return output.next_token_token_ids_logprobs_val[0].tolist()


def make_grammar(pattern):
    """A grammar over VOCAB one-letter tokens, 'a' onwards; EOS ends it."""
    vocabulary = [chr(ord("a") + i) for i in range(VOCAB)]
    vocabulary[EOS] = "</s>"
    compiled = GrammarCompiler(TokenizerInfo(vocabulary, stop_token_ids=[EOS])).compile_regex(pattern)
    matcher = GrammarMatcher(compiled, max_rollback_tokens=50)
    return XGrammarGrammar(matcher, VOCAB, compiled, None)


def grammar_tokens(model, sampler, request, count):
    """Plain decoding of a constrained request, the grammar advanced after each token as the scheduler does it."""
    tokens = []
    while len(tokens) < count and not request.grammar.is_terminated():
        tokens.append(plain_token(model, sampler, request, tokens)[0])
        request.grammar.accept_token(tokens[-1])
    request.grammar.rollback(len(tokens))
    return tokens


@pytest.mark.usefixtures("grammars_on_a_cpu")
def test_grammar_constrains_every_node_as_plain_decoding(sampler, verify):
    rng = np.random.default_rng(6)
    accepted = 0
    for trial in range(6):
        model = RandomModel(VOCAB, seed=trial)
        grammars = [make_grammar("[c-h][k-p][c-h]+"), None, make_grammar("(d|e)(f|g)(h|i)x")]
        requests = [make_request(grammar=g, frequency_penalty=0.5, **GREEDY) for g in grammars]
        expected = [
            grammar_tokens(model, sampler, r, 6) if r.grammar else plain_tokens(model, sampler, r, 6)
            for r in requests
        ]
        # Drafts that the grammar forbids, beside the constrained continuation.
        trees = []
        for request, tokens in zip(requests, expected, strict=True):
            wrong = rng.integers(0, VOCAB, 2).tolist()
            trees.append(Tree([request.output_ids[-1], *wrong, *tokens[:4]], [None, 0, 1, 0, 3, 4, 5]))
        mask = grammar_mask(trees, requests)
        emitted, _ = verify(model, sampler, trees, requests, grammar_mask=mask)
        for tree, tokens, want in zip(trees, emitted, expected, strict=True):
            kept = min(tree.longest_match(want) + 1, len(want))
            assert tokens[:kept] == want[:kept]
            accepted += kept - 1
    assert accepted > 30


def grammar_mask(trees, requests):
    size = max(len(t.tokens) for t in trees)
    padded = [t.padded(size) for t in trees]
    links = verify_input_of(trees, requests)
    host = GrammarTree.from_host(
        links.retrieve_next_token, links.retrieve_next_sibling, torch.tensor([t.tokens for t in padded])
    )
    info = Batch(requests, VOCAB).sampling_info
    return build_grammar_vocab_mask(reqs=requests, tree=host, sampling_info=info, device="cpu", barrier=None)
