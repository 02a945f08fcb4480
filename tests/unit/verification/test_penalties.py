"""Penalties of a whole batch at once, against those of one node at a time, bit for bit; and nothing waits for the device."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_patches.verification import penalties, verifier
from sglang_patches.verification.penalties import _stop_token_ids, has_penalties, penalise
from tests.unit.verification.plain_decoding import (
    Batch,
    RandomModel,
    emitted_tokens,
    layout_of,
    make_request,
    random_tree,
    sampler_on_cpu,
    tree_logits,
    verify_input_of,
)
from tests.unit.verification.test_verifier import tree_kernel_on_cpu

VOCAB = 24
PARAMS = [
    {},
    dict(repetition_penalty=1.4),
    dict(frequency_penalty=0.1),  # no power of two: its sums round
    dict(presence_penalty=1.3),
    dict(repetition_penalty=0.8, frequency_penalty=-0.3, presence_penalty=0.9),
    dict(min_new_tokens=7, stop_token_ids=[3, 9]),
    dict(min_new_tokens=7, stop_token_ids=[3, VOCAB]),
    dict(min_new_tokens=3, frequency_penalty=1.1),
    dict(min_new_tokens=1),
]


class SlowPenalties:
    """The oracle: of one request, at one node of its tree at a time."""

    def __init__(self, req, pending):
        self._params = req.sampling_params
        self._generated = _int64(req.output_ids, pending)
        self._stop_ids = (
            [id_ for id_ in _stop_token_ids(req, 2**31) if id_ < VOCAB]
            if self._params.min_new_tokens > 0
            else []
        )

    def apply(self, logits: torch.Tensor, path: Sequence[int]) -> None:
        """Penalise one row of logits, shape ``[vocab]``, in place."""
        tokens = _int64(self._generated, path)
        if len(tokens):
            self._penalise_generated(logits, tokens)
        if len(tokens) < self._params.min_new_tokens:
            logits[self._stop_ids] = float("-inf")

    def _penalise_generated(self, logits: torch.Tensor, tokens: np.ndarray) -> None:
        ids, counts = np.unique(tokens, return_counts=True)
        index = torch.from_numpy(ids).to(logits.device)
        additive = torch.from_numpy(self._additive(counts)).to(logits.device)
        scale = logits.new_tensor(self._params.repetition_penalty, dtype=torch.float32)
        values = (logits[index] + additive).to(logits.dtype)
        logits[index] = torch.where(values < 0, values * scale, values / scale).to(logits.dtype)

    def _additive(self, counts: np.ndarray) -> np.ndarray:
        step = np.full(counts.max(), self._params.frequency_penalty, dtype=np.float32)
        frequency = np.cumsum(step, dtype=np.float32)[counts - 1]
        return -frequency - np.float32(self._params.presence_penalty)


def _int64(*parts: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _requests(rng, most=12):
    return [make_request(output=rng.integers(0, VOCAB, rng.integers(1, most)).tolist(), **p) for p in PARAMS]


def _linked(tree):
    return [node for node, parent in enumerate(tree.parents) if node == 0 or parent is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary_is_padded", [False, True])
@pytest.mark.parametrize("by_request", [False, True])
def test_every_node_is_penalised_as_alone(dtype, vocabulary_is_padded, by_request):
    rng = np.random.default_rng(0)
    model = RandomModel(VOCAB)
    for most in (2, 12, 400):  # 400: a token stands there some 16 times
        requests = _requests(rng, most)
        pending = [rng.integers(0, VOCAB, rng.integers(0, 4)).tolist() for _ in requests]
        trees = [random_tree(rng, model, r, rng.integers(1, 12)) for r in requests]
        layout = layout_of(trees, requests, by_request)
        first = layout.first_rows
        room = torch.randn(layout.widths.sum(), VOCAB + (5 if vocabulary_is_padded else 0)).to(dtype)
        logits = room[:, :VOCAB]
        expected, beyond = logits.clone(), room[:, VOCAB:].clone()
        for r, (request, tree) in enumerate(zip(requests, trees, strict=True)):
            for node in _linked(tree) if has_penalties(request) else ():
                SlowPenalties(request, pending[r]).apply(expected[first[r] + node], tree.path(node))
        penalise(logits, requests, pending, layout)
        rows = [first[r] + node for r, tree in enumerate(trees) for node in _linked(tree)]
        assert torch.equal(logits[rows], expected[rows])
        assert torch.equal(room[:, VOCAB:], beyond)


def test_where_no_request_has_penalties_nothing_is_touched():
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    requests = [make_request()]
    tree = random_tree(np.random.default_rng(0), RandomModel(VOCAB), requests[0], 4)
    penalise(logits, requests, None, layout_of([tree], requests))
    assert torch.equal(logits, before)


READS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@pytest.mark.parametrize("params", [dict(temperature=0.0), dict(temperature=0.7, top_p=0.9)])
def test_no_tensor_is_read_after_the_launch(params, monkeypatch):
    """The verification for accelerators, on the CPU: a method that would wait for the device fails."""
    rng, model = np.random.default_rng(1), RandomModel(VOCAB)
    requests = [make_request(output=(5, 6, 5), **p, **params) for p in PARAMS]
    trees = [random_tree(rng, model, r, 8) for r in requests]
    verify_input, layout = verify_input_of(trees, requests), layout_of(trees, requests)
    output = LogitsProcessorOutput(next_token_logits=tree_logits(model, trees, requests))

    def refuse(*_, **__):
        raise AssertionError("reads the device")

    def kernel(**given):  # the CPU's operator, in place of the device's, reads its arguments
        with monkeypatch.context() as reading:
            for name, method in methods.items():
                reading.setattr(torch.Tensor, name, method)
            return tree_kernel_on_cpu(**given)

    monkeypatch.setattr(verifier, "_verify_walking", verifier._verify_all_nodes)
    monkeypatch.setattr(verifier, "verify_tree_greedy_func", kernel)
    methods = {name: getattr(torch.Tensor, name) for name in READS}
    with sampler_on_cpu() as sampler, monkeypatch.context() as launched:
        batch = Batch(requests, VOCAB)
        for name in READS:
            launched.setattr(torch.Tensor, name, refuse)
        result = verifier.TargetDraws(sampler).verify(verify_input, layout, batch, output)
    assert all(emitted_tokens(*result))


def test_on_a_device_one_copy_is_made_and_none_back(monkeypatch):
    copies, to_device = [], penalties._to_device
    monkeypatch.setattr(penalties, "is_pin_memory_available", lambda device: False)
    monkeypatch.setattr(penalties, "_to_device", lambda *given: copies.append(1) or to_device(*given))
    rng, model = np.random.default_rng(2), RandomModel(VOCAB)
    requests = _requests(rng)
    layout = layout_of([random_tree(rng, model, r, 8) for r in requests], requests)
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(layout.next_token.size, VOCAB, device="cuda")
        penalise(
            logits, requests, None, layout
        )  # FakeTensorMode raises where a value is asked for, and for mixed devices
    assert copies == [1]


def test_ids_that_the_model_has_no_row_for_are_left_out():
    """A client, or a tokenizer with more tokens than the model, may name them; a negative one would count from the end."""
    request = make_request(stop_token_ids=[3, VOCAB, VOCAB + 2, 2**31, -1])
    assert _stop_token_ids(request, VOCAB) == sorted({3, *request.eos_token_ids})
