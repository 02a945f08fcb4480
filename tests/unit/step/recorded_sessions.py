"""Recorded sessions put through the real worker: requests that come, are decoded, leave, are away for a while, and are retracted.

The worker, the requests, the batches, the verification, the sampler, the embedded datastore and the draft side are the real ones. The
models are not: the target's logits say the recorded answer, and the draft model says most of it (`recorded_drafts.py`). `SGLANG_USE_CPU_ENGINE=1 python -m tests.unit.step.recorded_sessions FOLDER`
writes what the worker does with them. A change that means to change it writes it over `recorded`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import itertools
import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from transformers import PretrainedConfig

from datastore_service.client import Datastore
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from datastore_service.engine.segment import build_segment
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import Entry, Reply
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.methods.registry import METHODS, DraftSurroundings
from sglang_patches.step import assembly, decode, length
from tests.unit.step.recorded_drafts import Clock, RecordingDraftSide

RECORDED = Path(__file__).parent / "recorded"
SESSIONS = RECORDED / "sessions.json.gz"
CONTEXT = 1024
STEPS = 125
LOOKAHEAD = 4


class Case(NamedTuple):
    """nodes: drafted tokens. size: requests at a time. lag: whether results are a step behind (overlap scheduling). retracted: whether
    requests are retracted now and then."""

    method: str
    nodes: int
    size: int
    lag: bool
    retracted: bool = False


CASES = {
    "alone": Case("SSSD", 15, 1, False),
    "lagging": Case("SSSD", 7, 4, True),
    "wide": Case("SSSD", 31, 6, True),
    "saguaro": Case("SAGUARO", 7, 3, False),
    "saguaro-lagging": Case("SAGUARO", 15, 4, True, retracted=True),
    "double": Case("DOUBLE", 7, 3, False),
    "double-lagging": Case("DOUBLE", 15, 4, True, retracted=True),
}


def load_sessions() -> dict:
    """prior: texts of the datastore. sessions: pairs of prompt and answer. vocabulary: ids are below it."""
    return json.loads(gzip.decompress(SESSIONS.read_bytes()))


class Place:
    """One of the batch's places: a recorded answer that a request is about to repeat."""

    _names = itertools.count()

    def __init__(self, row: int, prompt: list[int], answer: list[int], lag: bool, vocabulary: int) -> None:
        self.text = prompt + answer
        self.length = len(prompt) + 1  # known tokens, the prefill's included
        self.lag = lag
        self.req = Req(
            rid=f"request-{next(self._names)}",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0.0, max_new_tokens=1 << 20),
            vocab_size=vocabulary,
        )
        self.req.req_pool_idx = row
        self.relay = [answer[0]]
        self.unreported: list[int] = []
        self._report(self.relay)

    def emitted(self, tokens: list[int]) -> None:
        """What a step has brought."""
        assert tokens == self.text[self.length : self.length + len(tokens)], (
            "another text than the recorded one"
        )
        self.relay = tokens
        self.length += len(tokens)
        self._report(tokens)

    def _report(self, tokens: list[int]) -> None:
        """The scheduler gets the tokens now, or while the next step runs."""
        self.req.output_ids.extend(self.unreported if self.lag else tokens)
        self.unreported = tokens

    def retract(self) -> None:
        """Drops the last step, and prefills what is left, which brings a token."""
        self.length -= len(self.unreported) - 1
        self.unreported = []
        self.relay = [self.text[self.length - 1]]
        self._report(self.relay)

    def has_ended(self, width: int) -> bool:
        return self.length + width >= len(self.text)


class Target:
    """Its forward is nothing: the logits say what comes next in the recorded answers."""

    def __init__(self, vocabulary: int) -> None:
        config = SimpleNamespace(
            vocab_size=vocabulary,
            context_len=CONTEXT,
            hf_config=PretrainedConfig(),
            linear_attn_registry_result=None,
        )
        self.model_runner = SimpleNamespace(
            model=torch.nn.Module(), model_config=config, dtype=torch.float32, sampler=Sampler()
        )
        self.places: list[Place] = []
        self.running: dict[str, Place] = {}  # by the request's name
        self.launched: list[np.ndarray] = []

    def text_of(self, session: str) -> list[int]:
        return self.running[session].text

    def forward_batch_generation(self, batch: ScheduleBatch, is_verify: bool) -> GenerationBatchResult:
        given, size = batch.spec_info, len(self.places)
        positions = given.positions.view(size, -1).numpy()
        texts = [np.array(place.text) for place in self.places]
        tokens = np.stack([text[at + 1] for text, at in zip(texts, positions, strict=True)])
        logits = torch.zeros(tokens.size, self.model_runner.model_config.vocab_size)
        logits[torch.arange(tokens.size), torch.from_numpy(tokens).flatten()] = 50.0
        self.launched = [batch.input_ids.numpy(), positions, given.custom_mask.numpy()]
        output = LogitsProcessorOutput(next_token_logits=logits)
        return GenerationBatchResult(logits_output=output, can_run_cuda_graph=False)


class RecordingDatastore(EmbeddedDatastore):
    """Notes what is said to it and what it answers. It is told of refused tokens, as one that keeps them is."""

    wants_rejected = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(lambda: engine)
        self.said: list[str] = []

    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        replies = super().step(entries, deadline)
        self.said.append("step " + digest(map(_entry, entries)) + " " + digest(map(_reply, replies)))
        return replies

    def post(self, entries: Sequence[Entry]) -> None:
        super().post(entries)
        self.said.append("post " + digest(map(_entry, entries)))


def _entry(entry: Entry) -> object:
    name = entry.session.removeprefix("request-")
    refused = [(rejected.position, rejected.tokens.tolist()) for rejected in entry.rejected]
    budget, opening = entry.budget, entry.opening
    asked = (budget.nodes, budget.depth, budget.children) if budget.nodes else 0
    opened = opening and (opening.conversation, opening.publish, opening.prompt_length, opening.handing_over)
    return name, entry.start, entry.tokens.tolist(), refused, asked, opened, entry.closing, entry.expected


def _reply(reply: Reply) -> object:
    tree = reply.tree
    arrays = tree.tokens, tree.parents, tree.probs.astype(np.float32).view(np.int32), tree.sources
    return int(reply.status), reply.known, [array.tolist() for array in arrays]


def digest(values) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:16]


# Makes a draft side, given the worker and seconds by a clock.
StartDraft = Callable[[decode.DecodeWorker, Clock], DraftChannel]


def make_worker(
    name: str, target: Target, datastore: Datastore, start_draft: StartDraft
) -> decode.DecodeWorker:
    """The worker of a method. name: of the method."""
    now = Clock()
    method = METHODS[name]
    timed = dataclasses.replace(
        method, parts=lambda around: method.parts(dataclasses.replace(around, now=now))
    )
    made = decode.DecodeWorker.of(timed)
    made.start_draft = lambda worker: start_draft(worker, now)
    with (
        mock.patch.object(assembly, "open_datastore", lambda *_, **__: datastore),
        mock.patch.object(assembly, "namespace_of", lambda *_: None),
    ):
        arguments = SimpleNamespace(disaggregation_mode="null", speculative_draft_model_path=None)
        worker = made(arguments, 0, 0, target)
    if hasattr(worker.sources, "speculation"):
        worker.sources.speculation._now = now
    return worker


def acceptance(worker) -> list:
    """Per tier and bin of probability: how many nodes were verified, how many of them accepted."""
    rates = worker.policy.acceptance._of("")
    return [counts[: max(Tier) + 1].tolist() for counts in (rates._seen, rates._came)]


class Load:
    """A steady load. datastore, start_draft: in place of those that note what is said."""

    def __init__(
        self,
        recorded: dict,
        case: Case,
        datastore: Datastore | None = None,
        start_draft: StartDraft | None = None,
    ) -> None:
        Place._names = itertools.count()
        self._vocabulary, self._lag, self._width = recorded["vocabulary"], case.lag, case.nodes + 1
        self._retracted, size = case.retracted, case.size
        self._waiting = itertools.cycle(recorded["sessions"])
        prior = [np.array(text, np.int32) for text in recorded["prior"]]
        self._prior = build_segment(prior, self._vocabulary)
        self._said: list[list[str]] = []
        self._target = Target(self._vocabulary)
        self.worker = make_worker(
            case.method, self._target, datastore or self._datastore(), start_draft or self._start_draft
        )
        table = torch.arange(size * CONTEXT, dtype=torch.int32).view(size, CONTEXT)
        self._pool = SimpleNamespace(req_to_token=table)
        kv = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(move_kv_cache=lambda *_: None))
        self.worker.req_to_token_pool, self.worker.token_to_kv_pool_allocator = self._pool, kv
        self._places = [self._next(row) for row in range(size)]

    def step(self, number: int) -> str:
        """One decode step; what the target was given and what came of it."""
        away = number // 10 % 3 == 2 and len(self._places) > 1
        places = self._places[1:] if away else self._places
        self._target.places = places
        result = self.worker.forward_batch_generation(self._batch(places))
        tokens = result.next_draft_input.accept_tokens.view(-1, self._width).tolist()
        emitted = [row[:count] for row, count in zip(tokens, result.accept_lens.tolist(), strict=True)]
        for place, new in zip(places, emitted, strict=True):
            place.emitted(new)
            if place.has_ended(self._width):
                self._leave(place)
        if self._retracted and number % 20 == 15:
            self._retract(self._places[number // 20 % len(self._places)])
        return digest([array.tolist() for array in self._target.launched]) + " " + digest(emitted)

    def _datastore(self) -> RecordingDatastore:
        datastore = RecordingDatastore(Engine(self._vocabulary, [self._prior]))
        self._said.append(datastore.said)
        return datastore

    def _start_draft(self, worker: decode.DecodeWorker, now: Clock) -> RecordingDraftSide:
        around = DraftSurroundings(worker.options, LOOKAHEAD, worker.budget.nodes, self._datastore, now)
        side = RecordingDraftSide(self._target.text_of, functools.partial(worker.method.draft_parts, around))
        self._said.append(side.said)
        return side

    def said(self) -> list[str]:
        """What the datastore and the draft side were told and answered since the last call."""
        lines = [line for said in self._said for line in said]
        for said in self._said:
            said.clear()
        return lines

    def _retract(self, place: Place) -> None:
        place.retract()
        self.worker.observe_prefill(SimpleNamespace(reqs=[place.req]))

    def _leave(self, place: Place) -> None:
        if place.lag:
            place.emitted([])
        self.worker.note_request_finished(rid=place.req.rid, natural_stop=True)
        self._places[place.req.req_pool_idx] = self._next(place.req.req_pool_idx)

    def _next(self, row: int) -> Place:
        place = Place(row, *next(self._waiting), self._lag, self._vocabulary)
        self._target.running[place.req.rid] = place
        self.worker.observe_prefill(SimpleNamespace(reqs=[place.req]))
        return place

    def _batch(self, places: list[Place]) -> ScheduleBatch:
        lengths = torch.tensor([place.length - 1 for place in places])
        relay = torch.zeros(len(places), self._width, dtype=torch.int32)
        for row, place in enumerate(places):
            relay[row, : len(place.relay)] = torch.tensor(place.relay, dtype=torch.int32)
        batch = ScheduleBatch(
            reqs=[place.req for place in places],
            req_to_token_pool=self._pool,
            device="cpu",
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.tensor([place.req.req_pool_idx for place in places]),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            spec_info=NgramVerifyInput(
                draft_token_num=self._width,
                accept_tokens=relay.flatten(),
                accept_lens=torch.tensor([len(place.relay) for place in places], dtype=torch.int32),
                new_seq_lens=lengths,
            ),
        )
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, self._vocabulary)
        return batch


@contextlib.contextmanager
def configured(nodes: int) -> Iterator[None]:
    """SGLang's and the plugin's settings for a worker in this process."""
    group = SimpleNamespace(device_group=None, world_size=1)
    spec = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": nodes + 1,
        "speculative_num_steps": max(1, (nodes + 1) // 2),
        "speculative_eagle_topk": 2,
    }
    environment = {"SPECSTORE_LENGTH": "static", "SPECSTORE_NODES": str(nodes)}
    now = Clock()
    clock = SimpleNamespace(monotonic=now, perf_counter=now)
    with (
        mock.patch.object(decode, "time", clock),
        mock.patch.object(length, "time", clock),
        mock.patch.dict(os.environ, environment),
        get_context().override_server_args(
            device="cpu", page_size=1, attention_backend="specstore_cpu", sampling_backend="pytorch", **spec
        ),
        get_exec().deterministic.override(enable_deterministic_inference=False),
        get_parallel().override(tp_group=group, tp_rank=0),
    ):
        yield


def play(name: str, ranks: AbstractContextManager[object] | None = None) -> list[str]:
    """The lines of a case: what the datastore and the draft side were told and answered, what was verified, what was emitted; then the
    acceptance.
    ranks: the tensor-parallel ranks, None for one."""
    case, lines = CASES[name], []
    with configured(case.nodes), ranks or contextlib.nullcontext():
        load = Load(load_sessions(), case)
        for number in range(STEPS):
            verified = load.step(number)
            lines += [*load.said(), verified]
        lines.append(digest(acceptance(load.worker)))
        load.worker.clear_cache_pool()
    return lines


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for name in CASES:
        Path(sys.argv[1], f"{name}.txt").write_text("\n".join(play(name)) + "\n")


if __name__ == "__main__":
    main()
