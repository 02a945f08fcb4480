"""Rounds of the draft side with its model on a pretended accelerator: where each tensor is, and what the host waits for."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_patches.draft_process import batches
from sglang_patches.draft_process.model import SglangModel
from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import Row
from sglang_patches.draft_side.side import DraftSide
from sglang_patches.drafting.cache import SpeculationCache
from sglang_patches.exchange.messages import GREEDY, Committed, Opened, Sampling, Verifying
from tests.support.draft_side import saguaro_parts, text_of
from tests.unit.accelerator.interpreted.device import READ, Device
from tests.unit.accelerator.interpreted.server import CONTEXT, model_config, settings

VOCABULARY, CHUNK, ROWS, SESSIONS, SLOTS = 23, 32, 12, 4, 400
SAMPLINGS = (
    GREEDY,
    Sampling(0.8, 5, 0.9, 0.05, 11),
    Sampling(1.3, 1 << 30, 0.5, 0.0, None),
    Sampling(0.7, 1 << 30, 1.0, 0.0, 12),
)
LENGTHS = (1, 20, 45, 90)
CUDA = torch.device("cuda:0")
# What a ScheduleBatch gives a ForwardBatch as it is.
BORROWED = ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc")

# What it takes from requests, of which a draft forward has none, or makes for other hardware.
OF_REQUESTS = {
    "lora_ids",
    "rids",
    "contains_last_prefill_chunk",
    "kv_loc_plan",
    "global_num_token_non_padded_cpu",
}
ALONE = {"attn_dcp_size": 1, "moe_ep_size": 1, "attn_dp_size": 1, "tp_size": 1, "dp_size": 1}
NOTHING = ([], [], [])


def logits_of(text: list[int]) -> np.ndarray:
    return np.random.default_rng([len(text), *text]).normal(size=VOCABULARY).astype(np.float32)


class Runner:
    """SGLang's pools on the device, and a model that keeps tokens where others keep keys and values. forwards: what was noted of the
    device before each, and its mode."""

    spec_algorithm, is_draft_worker, lora_manager = None, False, None
    model_config = model_config(mla=False)
    ngram_embedding_manager = SimpleNamespace(enabled=False)

    def __init__(self, device: Device, backend: str) -> None:
        self._device, self.device, self.prefill_attention_backend_str = device, "cuda", backend
        self.req_to_token_pool = ReqToTokenPool(SESSIONS + ROWS, CONTEXT, "cuda", False)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(SLOTS, torch.float16, "cuda", None, False)
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=self.req_to_token_pool.req_to_token,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
            token_to_kv_pool=None,
            page_size=1,
            device="cuda",
        )
        self._kept = torch.full((SLOTS + 1,), VOCABULARY)
        self.forwards: list[tuple[ForwardMode, Noted]] = []

    def forward(self, batch: ForwardBatch) -> SimpleNamespace:
        device = self._device
        self.forwards.append((batch.forward_mode, noted(device)))
        assert_as_sglang_makes_it(device, batch, self)
        table, slots = (device.on_host(x) for x in (self.req_to_token_pool.req_to_token, batch.out_cache_loc))
        assert len(slots.unique()) == len(slots) and slots.min() > 0
        self._kept[slots] = device.on_host(batch.input_ids)
        rows = (device.on_host(x).tolist() for x in (batch.req_pool_indices, batch.seq_lens))
        texts = [self._kept[table[row, :length].long()].tolist() for row, length in zip(*rows, strict=True)]
        logits = torch.from_numpy(np.stack([logits_of(text) for text in texts]))
        on_device = logits.to("cuda", non_blocking=True)
        noted(device)
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=on_device))


def assert_as_sglang_makes_it(device: Device, batch: ForwardBatch, runner: Runner) -> None:
    """Every field is what SGLang makes of the same batch of its scheduler: on the same device, of the same type."""
    for name in BORROWED:
        tensor = getattr(batch, name)
        assert (tensor.device, tensor.dtype, tensor.is_contiguous()) == (CUDA, torch.int64, True), name
    lengths = batch.seq_lens_cpu
    assert (lengths.device.type, lengths.dtype) == ("cpu", torch.int64)
    assert lengths.tolist() == device.on_host(batch.seq_lens).tolist()
    schedule = ScheduleBatch(
        reqs=[],
        device="cuda",
        forward_mode=batch.forward_mode,
        **{name: getattr(batch, name) for name in BORROWED},
        seq_lens_cpu=lengths.clone(),
        extend_lens=batch.extend_seq_lens_cpu,
        prefix_lens=batch.extend_prefix_lens_cpu,
        extend_logprob_start_lens=batch.extend_logprob_start_lens_cpu,
        extend_num_tokens=batch.extend_num_tokens,
    )
    sglang = ForwardBatch.init_new(
        schedule, runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
    )
    for field in dataclasses.fields(ForwardBatch):
        if field.name not in OF_REQUESTS:
            ours, theirs = (as_kind(device, getattr(of, field.name)) for of in (batch, sglang))
            assert ours == theirs, field.name


def as_kind(device: Device, value: object) -> object:
    """A tensor with all that a kernel asks of it; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, value.is_contiguous(), device.on_host(value).tolist()
    return value


class Noted(NamedTuple):
    """What a device noted."""

    waits: list[str]
    uploads: list[str]
    kernels: list[str]


def noted(device: Device) -> Noted:
    """Since it was asked last."""
    lists = device.waits, device.uploads, device.kernels
    taken = Noted(*map(list, lists))
    for notes in lists:
        notes.clear()
    return taken


class Model(SglangModel):
    """Checks what is drafted, and what the device notes of a call."""

    def __init__(self, device: Device, runner: Runner) -> None:
        super().__init__(runner, ROWS, CHUNK, VOCABULARY)
        self._device = device
        self.decoded = self.prefilled = 0

    def prefill(self, drafts: Sequence[Draft]) -> bool:
        assert noted(self._device) == NOTHING
        done = super().prefill(drafts)
        after = noted(self._device)
        chunks = len(self._forwards(ForwardMode.EXTEND))
        self.prefilled += chunks
        assert [wait.endswith(READ) for wait in after.waits] == [True] * chunks and after.uploads == []
        return done

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        assert noted(self._device) == NOTHING
        found = super().forward(rows)
        after = noted(self._device)
        assert [wait.endswith(READ) for wait in after.waits] == [True] and after.uploads == ["pinned"]
        self.decoded += len(self._forwards(ForwardMode.DECODE))
        if all(row.draft.sampling.noise is None for row in rows):
            assert len(after.kernels) <= 8, after.kernels  # no hash
        for (draft, node), candidates in zip(rows, found, strict=True):
            if draft.sampling.noise is None:
                assert candidates.tokens[0] == logits_of(text_of(draft, node)).argmax()
        return found

    def _forwards(self, mode: ForwardMode) -> list[Noted]:
        """Before each forward the host waits for nothing, and tells the device all at once."""
        forwards = [(at, before) for at, before in self._runner.forwards]
        self._runner.forwards.clear()
        for at, before in forwards:
            assert at == mode and before.waits == [] and before.uploads == ["pinned"]
            assert len(before.kernels) <= 3, before.kernels
        return forwards


class Session:
    """The worker's side of one: it verifies a path of the trie, and commits some of it and a token of its own."""

    def __init__(
        self, draw: random.Random, side: DraftSide, name: str, length: int, sampling: Sampling
    ) -> None:
        self._draw, self._side, self.name = draw, side, name
        self.text = [draw.randrange(VOCABULARY) for _ in range(length)]
        self.verified: list[int] | None = None
        self.cache = SpeculationCache()
        epoch = self.cache.open(name, length).epoch
        side.hear([Opened(name, np.array(self.text, np.int32), epoch, sampling)])

    def verify(self) -> None:
        trie = self.cache.trie(self.name)
        path = [trie.root]
        while (children := list(trie.children(path[-1]))) and len(path) < 4:
            path.append(self._draw.choice(children)[0])
        self.verified = [trie.token(node) for node in path[1:]]
        nodes, parents = np.array(path[1:], np.int64), np.array(path[:-1], np.int64)
        self._side.hear([Verifying(self.name, trie.epoch, nodes, parents, np.array(self.verified, np.int32))])

    def commit(self) -> None:
        accepted = self._draw.randint(0, len(self.verified))
        refused = self.verified[accepted : accepted + 1]
        own = self._draw.choice([token for token in range(VOCABULARY) if token not in refused])
        tokens = np.array([*self.verified[:accepted], own], np.int32)
        self.cache.advance(self.name, len(self.text), tokens)
        epoch = self.cache.trie(self.name).epoch
        answers = self._side.hear([Committed(self.name, len(self.text), tokens, epoch)])
        self.text += tokens.tolist()
        self.verified = None
        self.hear(answers)

    def hear(self, answers: list) -> None:
        for answer in answers:
            assert answer.session != self.name or self.cache.grow(answer)


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    device.run_kernels_on_host(monkeypatch)
    monkeypatch.setattr(batches, "is_pin_memory_available", lambda device: True)
    return device


@pytest.mark.parametrize("backend", ["triton", "fa3"])
def test_every_tensor_is_on_its_device_and_the_host_waits_for_the_candidates_alone(device, backend):
    """backend: by its name SGLang chooses how it finds the positions of a prefill, with which ours are compared."""
    draw = random.Random(0)
    with settings(1), get_parallel().override(**ALONE), torch.compiler.set_stance("force_eager"), device:
        model = Model(device, Runner(device, backend))
        noted(device)
        side = DraftSide(model, saguaro_parts(), ROWS, ROWS)
        sessions = [
            Session(draw, side, str(at), length, sampling)
            for at, (length, sampling) in enumerate(zip(LENGTHS, SAMPLINGS, strict=True))
        ]
        for turn in range(40):
            answers = side.work() or []
            for at, session in enumerate(sessions):
                session.hear(answers)
                if (turn + at) % 3 == 0:
                    (session.verify if session.verified is None else session.commit)()
        assert noted(device) == NOTHING
    assert model.decoded > 20 and model.prefilled >= 4
