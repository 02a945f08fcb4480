"""A decode step of the worker, from draft to commit, on a pretended accelerator."""

from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.kernels.ops.speculative import cache_locs, spec_tree, tree
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch._subclasses.fake_tensor import FakeTensor

from sglang_patches.step.base import Drafted, TreeWorker
from sglang_patches.step.courier import Courier
from sglang_patches.verification.filters import keep_filtered
from sglang_patches.verification.layout import pack
from sglang_patches.verification.noise_verifier import SharedNoise
from sglang_patches.verification.shared_noise import NO_NOISE, best, draw
from sglang_patches.verification.verifier import TargetDraws
from tests.unit.accelerator.cuda_source import CudaSource
from tests.unit.accelerator.interpreted.device import READ, Device
from tests.unit.accelerator.interpreted.server import Server, model_config
from tests.unit.accelerator.streams import Streams
from tests.unit.accelerator.trees import VOCABULARY, forest, verification
from tests.unit.verification.plain_decoding import make_request

CUDA = torch.device("cuda:0")


class Worker(TreeWorker):
    """The trees it is given, as packed. Its tokens go to `receiver`, if it has one."""

    receiver = None

    def tokens_underway(self, drafted, accept_tokens, accept_lens):
        if self.receiver:
            self.courier.send(accept_tokens, accept_lens, self.receiver)

    def draft_batch(self, batch, step):
        return Drafted(self.trees, np.full(len(self.trees), self.trees.shape[2] + 1))

    def observe_prefill(self, batch):
        raise NotImplementedError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return CudaSource(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def device(monkeypatch, source):
    """What SGLang takes from a GPU's platform, and its compiled walk."""
    device = Device()
    device.run_kernels_on_host(monkeypatch)
    monkeypatch.setattr(cache_locs, "_is_cuda", True)
    monkeypatch.setattr(spec_tree, "_is_cuda", True)
    monkeypatch.setattr(
        tree,
        "verify_tree_greedy",
        lambda **tensors: source.verify_tree_greedy(**{k: device.on_host(v) for k, v in tensors.items()}),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(FakeTensor, "record_stream", lambda tensor, stream: None, raising=False)
    return device


class Batch(SimpleNamespace):
    """The part of a ScheduleBatch that a decode step reads and writes."""


class Target:
    """The target model: logits under which `tokens` [batch, width] are all but certain. Remembers its launch."""

    def __init__(self, device, server, tokens):
        self.device, self.server, self.tokens = device, server, tokens
        self.logits = server.noise(tokens.size, VOCABULARY)
        self.logits[torch.arange(tokens.size), torch.from_numpy(tokens).flatten()] += 50
        self.moved = []
        self.model_runner = SimpleNamespace(sampler=Sampler(), model_config=model_config(mla=False))

    @property
    def verification(self):
        return self.server.verification

    def get_memory_pool(self):
        pool = SimpleNamespace(move_kv_cache=lambda *slots: self.moved.append(slots))
        return self.server.requests, SimpleNamespace(get_kvcache=lambda: pool)

    def forward_batch_generation(self, batch, is_verify):
        assert is_verify
        self.launched = SimpleNamespace(**vars(batch))
        self.waits_before_launch = list(self.device.waits)
        self.device.waits.clear()
        logits = self.logits.to("cuda", non_blocking=True)
        return SimpleNamespace(
            logits_output=LogitsProcessorOutput(next_token_logits=logits), can_run_cuda_graph=False
        )


def decode(device, width, verifier=None, carry=lambda worker: None, **sampling) -> Target:
    """One step on the device; its target, with `result` and `waits_after_launch`."""
    trees = forest(width, seed=width)
    v = verification(trees, width)
    with (
        get_context().override_server_args(
            device="cuda",
            sampling_backend="pytorch",
            speculative_num_draft_tokens=width,
            speculative_num_steps=max(1, width // 2),
            speculative_eagle_topk=2,
        ),
        get_exec().deterministic.override(enable_deterministic_inference="sampling_seed" in sampling),
        get_parallel().override(tp_rank=0, tp_group=SimpleNamespace(device_group=None, world_size=1)),
        torch.compiler.set_stance("force_eager"),
        device,
    ):
        target = Target(device, Server(v), v.likely_tokens(np.random.default_rng(width)))
        worker = Worker(None, 0, 0, target, verifier)
        worker.req_to_token_pool, worker.token_to_kv_pool_allocator = target.get_memory_pool()
        worker.trees = pack(trees, width)
        carry(worker)
        batch = make_batch(target.server, sampling)
        device.waits.clear()
        target.result = worker.forward_batch_generation(batch)
        target.waits_after_launch = list(device.waits)
    return target


def make_batch(server, sampling):
    v = server.verification
    lengths = torch.from_numpy(v.seq_lens)
    reqs = [
        make_request(prompt=range(length), output=(root,), **sampling)
        for length, root in zip(v.seq_lens, v.tokens[:, 0].tolist(), strict=True)
    ]
    batch = Batch(
        reqs=reqs,
        device="cuda",
        forward_mode=ForwardMode.DECODE,
        seq_lens=lengths.to("cuda"),
        seq_lens_cpu=lengths,
        req_pool_indices=server.rows.to("cuda"),
        req_to_token_pool=SimpleNamespace(req_to_token=server.requests.req_to_token.to("cuda")),
        input_ids=None,
        out_cache_loc=None,
        spec_info=NgramVerifyInput(
            draft_token_num=v.width,
            new_seq_lens=lengths.to("cuda"),
            accept_tokens=torch.zeros(v.batch_size * v.width, dtype=torch.int32, device="cuda"),
            accept_lens=torch.ones(v.batch_size, dtype=torch.int32, device="cuda"),
        ),
        return_logprob=False,
        top_logprobs_nums=[0] * len(reqs),
        token_ids_logprobs=[None] * len(reqs),
        has_grammar=False,
        after_idle_gap=False,
    )
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, VOCABULARY)
    return batch


def on_device(device, tensor, dtype, shape):
    """The values of a tensor that must be where and what the next kernel takes it for."""
    assert (tensor.device, tensor.dtype, tuple(tensor.shape)) == (CUDA, dtype, shape)
    assert tensor.is_contiguous()
    return device.on_host(tensor).numpy()


@pytest.mark.parametrize("width", [1, 8, 33])
def test_the_target_is_launched_with_the_layout(device, width):
    step = decode(device, width, temperature=0.0)
    v, batch = step.verification, step.launched
    flat, square = (v.batch_size * width,), (v.batch_size, width)
    for tensor, dtype, expected in (
        (batch.input_ids, torch.int64, v.layout.tokens),
        (batch.spec_info.draft_token, torch.int64, v.layout.tokens),
        (batch.spec_info.positions, torch.int64, v.layout.positions),
        (batch.out_cache_loc, torch.int64, step.server.write_slots().numpy()),
    ):
        np.testing.assert_array_equal(on_device(device, tensor, dtype, flat), expected)
    for tensor, expected in (
        (batch.spec_info.retrieve_index, v.layout.retrieve_index),
        (batch.spec_info.retrieve_next_token, v.layout.next_token),
        (batch.spec_info.retrieve_next_sibling, v.layout.next_sibling),
    ):
        np.testing.assert_array_equal(on_device(device, tensor, torch.int64, square), expected)
    mask = v.mask.numpy()
    np.testing.assert_array_equal(
        on_device(device, batch.spec_info.custom_mask, torch.bool, mask.shape), mask
    )
    assert batch.forward_mode.is_target_verify() and batch.spec_info.draft_token_num == width


@pytest.mark.parametrize("width", [1, 8, 33])
@pytest.mark.parametrize("verifier", [TargetDraws, SharedNoise])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "sampling_seed": 3},
    ],
)
def test_commits_what_the_target_says_and_waits_for_nothing_after_the_launch(
    device, sampling, verifier, width
):
    step = decode(device, width, verifier, **sampling)
    v, result = step.verification, step.result
    assert step.waits_after_launch == []
    paths = [v.walk(request, step.tokens[request]) for request in range(v.batch_size)]
    emitted = [step.tokens[request][path].tolist() for request, path in enumerate(paths)]
    lengths = [len(path) for path in paths]
    relay = result.next_draft_input
    for tensor in (result.accept_lens, relay.accept_lens):
        assert on_device(device, tensor, torch.int32, (v.batch_size,)).tolist() == lengths
    for tensor in (result.next_token_ids, relay.accept_tokens):
        rows = on_device(device, tensor, torch.int32, (v.batch_size * width,)).reshape(v.batch_size, width)
        assert [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)] == emitted
    for tensor in (result.new_seq_lens, relay.new_seq_lens):
        assert on_device(device, tensor, torch.int64, (v.batch_size,)).tolist() == list(v.seq_lens + lengths)
    if width > 1:
        assert_moved(device, step, paths)


def test_a_courier_brings_the_tokens_and_the_host_does_not_wait(device):
    streams, found = Streams(), SimpleQueue()

    def carry(worker):
        worker.courier, worker.receiver = Courier(streams), found.put

    step = decode(device, 8, carry=carry, temperature=0.0)
    assert step.waits_after_launch == [] and found.empty()
    streams.recorded[0].happen()
    v = step.verification
    walks = [v.walk(request, tokens) for request, tokens in enumerate(step.tokens)]
    expected = [tokens[walk].tolist() for tokens, walk in zip(step.tokens, walks, strict=True)]
    assert [tokens.tolist() for tokens in found.get(timeout=60)] == expected


def assert_moved(device, step, paths):
    ((target, source),) = step.moved
    shape = (step.verification.batch_size * step.verification.width,)
    windows = step.server.write_slots().view(-1, step.verification.width).tolist()
    front = [slot for window, path in zip(windows, paths, strict=True) for slot in window[: len(path)]]
    kept = [window[row] for window, path in zip(windows, paths, strict=True) for row in path]
    assert on_device(device, target, torch.int64, shape).tolist()[: len(front)] == front
    assert on_device(device, source, torch.int64, shape).tolist()[: len(kept)] == kept


@pytest.mark.parametrize("flashinfer", [False, True])
def test_the_device_filters_and_draws_as_the_host_does(device, flashinfer):
    rows = 70  # more than are hashed at once
    source = torch.Generator().manual_seed(0)
    probabilities = torch.softmax(3 * torch.randn(rows, 500, generator=source), dim=-1)
    asked = torch.randint(1, 80, (rows,), generator=source), *(torch.rand(2, rows, generator=source) / 2)
    noise = torch.randint(0, 2**63 - 1, (rows,), generator=source), torch.arange(rows)
    noise[0][::5] = NO_NOISE
    kept = keep_filtered(probabilities, *asked, flashinfer=flashinfer)
    expected = kept, draw(kept, *noise), *best(probabilities, *noise, 4)
    with device:
        p, k, top_p, min_p, seeds, positions = (x.to("cuda") for x in (probabilities, *asked, *noise))
        device.waits.clear()
        filtered = keep_filtered(p, k, top_p, min_p, most=80, flashinfer=flashinfer)
        found = filtered, draw(filtered, seeds, positions), *best(p, seeds, positions, 4)
        assert device.waits == []
    for here, there in zip(expected, found, strict=True):
        values = torch.from_numpy(on_device(device, there, here.dtype, tuple(here.shape)))
        torch.testing.assert_close(values, here)


def test_before_the_launch_the_host_reads_the_last_steps_tokens_and_waits_for_nothing_else(device):
    """Those it needs: the datastore drafts from them."""
    waits = decode(device, 8, temperature=0.0).waits_before_launch
    assert waits and all(wait.endswith(READ) for wait in waits)


def test_the_device_sees_what_makes_the_host_wait(device):
    with device:
        on = torch.arange(4, device="cuda")
        for wait in (
            lambda: on.sum().item(),
            lambda: on.tolist(),
            lambda: on.cpu(),
            lambda: torch.empty(4, dtype=torch.int64).copy_(on),
            lambda: bool((on > 1).any()),
            lambda: on.to("cpu", non_blocking=True),
            lambda: torch.ones(2).to("cuda"),
            lambda: torch.tensor([1, 2], device="cuda"),
            lambda: on[[0, 1]],
            lambda: on.index_fill_(0, torch.tensor([1], device="cuda"), 5),
        ):
            device.waits.clear()
            wait()
            assert device.waits
        device.waits.clear()
        assert device.on_host((on + 1)[2:] * torch.ones(2).to("cuda", non_blocking=True)).tolist() == [3, 4]
        assert on.shape == (4,) and on[0] is not None and device.waits == []
        with pytest.raises(RuntimeError, match="on the same device"):
            on + torch.ones(4)
