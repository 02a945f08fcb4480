"""The worker, the requests and the batch of `benchmarks.host_time`, and the marks between the parts of a step."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel, get_spec
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from transformers import PretrainedConfig

from benchmarks.pipeline.pairs import Pair
from benchmarks.pipeline.simulation import PairModel
from benchmarks.traces import Trace
from datastore_service.client.embedded import EmbeddedDatastore
from datastore_service.engine.engine import Engine
from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.exchange.messages import Answer, Message
from sglang_patches.exchange.wire import frame_of, messages_from_worker
from sglang_patches.methods.registry import METHODS
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
from sglang_patches.options import Options
from sglang_patches.step import assembly, base, decode, widths

# Parts of the time, each with the event that ends it.
PARTS = ("entries", "datastore", "choose, pack", "lay out", "prepare")
# Parts of these parts, and what is done after the launch: functions of the worker, its sources, or its speculation.
INNER = ("_settle", "look_up", "united", "verification_launched")
LONG = 128  # tokens of the answers that are taken
VOCABULARY = 49152
CONTEXT = 4096
WARM_UP = 15
ROWS = Options().draft_rows
FORWARDS, AGREEMENT, CHOICES = 5, 0.8, 32  # of the draft model: a step, how often it is right, of a row


class Marks:
    """The times at which a step passed from part to part."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def here(self) -> None:
        self.times.append(time.perf_counter())

    def before(self, function):
        """The function, with a mark at its beginning."""

        def marked(*args, **kwargs):
            self.here()
            return function(*args, **kwargs)

        return marked

    def around(self, function):
        """The same, with a mark at its end too."""

        def marked(*args, **kwargs):
            result = self.before(function)(*args, **kwargs)
            self.here()
            return result

        return marked


class DraftsBetweenSteps(DraftChannel):
    """A draft side in this process. grown: nodes that it has sent."""

    def __init__(self, pairs: dict[str, Pair], rows: int) -> None:
        drafter = Rollouts(Options().draft_lookahead)
        parts = DraftParts(lambda: Learner(GeometricFanOut(), drafter))
        self._side = DraftSide(PairModel(pairs), parts, rows, rows)
        self._incoming = messages_from_worker()
        self._frames: list[bytes] = []
        self._answers: list[Answer] = []
        self.grown = 0

    def post(self, messages: Sequence[Message]) -> None:
        if messages:
            self._frames.append(frame_of(messages))

    def collect(self, seconds: float) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def draft(self) -> None:
        """What it does while the target runs."""
        self._answers += self._side.hear(self._incoming.feed(b"".join(self._frames)))
        self._frames.clear()
        for _ in range(FORWARDS):
            self._answers += self._side.work() or []
        self.grown = sum(len(answer.tokens) for answer in self._answers)

    def close(self) -> None:
        self._frames.clear()


def draft_model_s(text: np.ndarray, seed: int) -> Pair:
    """What a draft model says in place of each token but the first: its first choice or its second is right."""
    rng, following = np.random.default_rng(seed), text[1:]
    choices = rng.integers(0, VOCABULARY, (len(following), CHOICES))
    right = rng.random(len(following)) < AGREEMENT
    choices[np.arange(len(following)), np.where(right, 0, 1)] = following
    probabilities = np.full(choices.shape, 0.01, np.float32)
    probabilities[:, :2] = 0.5, 0.2
    begin, following, choices = (tokens.astype(np.int32) for tokens in (text[:1], following, choices))
    return Pair(begin, following, choices, probabilities)


class Place:
    """One of the batch's places: a recorded answer that a request is about to repeat."""

    _names = itertools.count()

    def __init__(self, row: int, trace: Trace) -> None:
        self.text = np.concatenate([trace.prompt, trace.output]).astype(np.int64)
        self.length = len(trace.prompt) + 1  # known tokens, the prefill's included
        self.req = Req(
            rid=f"request-{next(self._names)}",
            origin_input_text="",
            origin_input_ids=array("q", trace.prompt.tolist()),
            sampling_params=SamplingParams(temperature=0.0, max_new_tokens=1 << 20),
        )
        self.req.req_pool_idx = row
        self.unreported = [int(self.text[len(trace.prompt)])]

    def reported(self, tokens: list[int]) -> None:
        """The scheduler gets the last step's tokens while the next one runs."""
        self.req.output_ids.extend(self.unreported)
        self.unreported = tokens
        self.length += len(tokens)

    def has_ended(self, width: int) -> bool:
        return self.length + width >= len(self.text)


class Target:
    """A target whose forward is nothing, and which says what the recorded answers say."""

    def __init__(self, places: list[Place], marks: Marks) -> None:
        config = SimpleNamespace(  # of a dense model
            vocab_size=VOCABULARY,
            context_len=CONTEXT,
            hf_config=PretrainedConfig(),
            linear_attn_registry_result=None,
        )
        model = torch.nn.Module()
        self.model_runner = SimpleNamespace(
            model=model, model_config=config, dtype=torch.float32, sampler=Sampler()
        )
        self._places, self._marks = places, marks

    def forward_batch_generation(self, batch: ScheduleBatch, is_verify: bool) -> GenerationBatchResult:
        self._marks.here()
        nothing = LogitsProcessorOutput(next_token_logits=None)
        return GenerationBatchResult(logits_output=nothing, can_run_cuda_graph=False)

    def verify(self, verify_input: NgramVerifyInput, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        """In place of the verifier's: walks down the trees where they agree with the answers."""
        size, width = verify_input.retrieve_index.shape
        positions = verify_input.positions.view(size, width)
        following = [torch.from_numpy(p.text)[at + 1] for p, at in zip(self._places, positions, strict=True)]
        predict, accept_index, drafts = verify_tree_greedy_func(
            predicts=torch.zeros(size * width, dtype=torch.int32),
            accept_index=torch.full((size, width), -1, dtype=torch.int32),
            accept_token_num=torch.empty(size, dtype=torch.int32),
            candidates=verify_input.draft_token.view(size, width),
            retrieve_index=verify_input.retrieve_index,
            retrieve_next_token=verify_input.retrieve_next_token,
            retrieve_next_sibling=verify_input.retrieve_next_sibling,
            target_predict=torch.stack(following),
            topk=-1,
        )
        return predict, drafts + 1, accept_index


class Load:
    """A steady load of `size` requests."""

    def __init__(
        self,
        traces: Sequence[Trace],
        size: int,
        engine: Engine,
        marks: Marks,
        method: str = "SSSD",
        draft_rows: int = ROWS,
    ) -> None:
        self._pairs: dict[str, Pair] = {}
        self.drafts = DraftsBetweenSteps(self._pairs, draft_rows)
        self._waiting = itertools.cycle(trace for trace in traces if len(trace.output) >= LONG)
        self._places = [Place(row, next(self._waiting)) for row in range(size)]
        datastore = EmbeddedDatastore(lambda: engine)
        datastore.step = marks.around(datastore.step)  # type: ignore[method-assign]
        self._width = get_spec().speculative_num_draft_tokens
        with (
            mock.patch.object(assembly, "open_datastore", lambda *_, **__: datastore),
            mock.patch.object(assembly, "namespace_of", lambda *_: None),
            mock.patch.object(widths, "measure_row_seconds", lambda *_: lambda rows: 1.0),
            mock.patch.object(decode.DecodeWorker, "start_draft", lambda *_: self.drafts),
        ):
            arguments = SimpleNamespace(disaggregation_mode="null", speculative_draft_model_path="draft")
            self.target = Target(self._places, marks)
            self.worker = decode.DecodeWorker.of(METHODS[method])(arguments, 0, 0, self.target)
        self.worker.launch_blocks = False  # as on an accelerator
        table = torch.arange(size * CONTEXT, dtype=torch.int32).view(size, CONTEXT)
        self._pool = SimpleNamespace(req_to_token=table)
        kv = SimpleNamespace(get_kvcache=lambda: SimpleNamespace(move_kv_cache=lambda *_: None))
        self.worker.req_to_token_pool, self.worker.token_to_kv_pool_allocator = self._pool, kv
        self._relay = np.zeros((size, self._width), np.int32)
        self._counts = np.ones(size, np.int32)
        for row in range(size):
            self._admit(row)

    def step(self) -> None:
        self.drafts.draft()
        batch = self._batch()
        result = self.worker.forward_batch_generation(batch)
        self._relay = result.next_draft_input.accept_tokens.view(-1, self._width).numpy().copy()
        self._counts = result.accept_lens.numpy().copy()
        for row, place in enumerate(self._places):
            place.reported(self._relay[row, : self._counts[row]].tolist())
            if place.has_ended(self._width):
                place.reported([])
                self.worker.note_request_finished(rid=place.req.rid, natural_stop=True)
                self._places[row] = Place(row, next(self._waiting))
                self._admit(row)

    def _admit(self, row: int) -> None:
        place = self._places[row]
        self._pairs[place.req.rid] = draft_model_s(place.text, len(self._pairs))
        self.worker.observe_prefill(SimpleNamespace(reqs=[place.req]))
        self._relay[row, 0], self._counts[row] = place.unreported[0], 1

    def _batch(self) -> ScheduleBatch:
        lengths = torch.tensor([place.length - 1 for place in self._places])
        return ScheduleBatch(
            reqs=[place.req for place in self._places],
            req_to_token_pool=self._pool,
            device="cpu",
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.arange(len(self._places)),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            spec_info=NgramVerifyInput(
                draft_token_num=self._width,
                accept_tokens=torch.from_numpy(self._relay.ravel()),
                accept_lens=torch.from_numpy(self._counts),
                new_seq_lens=lengths,
            ),
        )


@contextlib.contextmanager
def configured(nodes: int, length: str) -> Iterator[None]:
    """SGLang's and the plugin's settings for a worker in this process."""
    group = SimpleNamespace(device_group=None, world_size=1)
    spec = {
        "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": nodes + 1,
        "speculative_num_steps": max(1, (nodes + 1) // 2), "speculative_eagle_topk": 2,
    }  # fmt: skip
    environment = {"SPECSTORE_LENGTH": length, "SPECSTORE_NODES": str(nodes), "SPECSTORE_PUBLISH": "off"}
    with (
        mock.patch.dict(os.environ, environment),
        get_context().override_server_args(
            device="cpu", page_size=1, attention_backend="specstore_cpu", **spec
        ),
        get_parallel().override(tp_group=group, tp_rank=0),
    ):
        yield


def measure(
    traces: Sequence[Trace],
    engine: Engine,
    size: int,
    nodes: int,
    length: str,
    steps: int,
    method: str = "SSSD",
    draft_rows: int = ROWS,
) -> dict[str, float]:
    """Median milliseconds of each part over the steps, of the whole, and of the functions of INNER; new nodes of the draft side
    a step."""
    marks, rows, inner, grown = Marks(), [], [], []
    spent: Counter[str] = Counter()
    with configured(nodes, length), contextlib.ExitStack() as patches:
        load = Load(traces, size, engine, marks, method, draft_rows)
        for name in INNER:
            worker, sources = load.worker, load.worker.sources
            owners = (worker, sources, getattr(sources, "speculation", None))
            if (owner := next((owner for owner in owners if hasattr(owner, name)), None)) is not None:
                timed = _timed(getattr(owner, name), name, spent)
                patches.enter_context(mock.patch.object(owner, name, timed))
        with (
            mock.patch.object(load.worker.verifier, "verify", load.target.verify),
            # On an accelerator the host has a step's tokens when the next one begins.
            mock.patch.object(load.worker, "tokens_known", lambda step: None),
            mock.patch.object(base, "lay_out", marks.around(base.lay_out)),
            mock.patch.object(load.worker, "_decode", marks.before(load.worker._decode)),
        ):
            for _ in range(WARM_UP + steps):
                marks.times.clear()
                spent.clear()
                load.step()
                rows.append(_parts(marks.times[:6]))
                inner.append([spent[name] for name in INNER])
                grown.append(load.drafts.grown)
        load.worker.clear_cache_pool()
    table = 1e3 * np.array([row for row in rows[WARM_UP:] if row is not None])
    medians = np.median(table, axis=0)
    within = 1e3 * np.median(inner[WARM_UP:], axis=0)
    found = dict(zip(PARTS, medians.tolist(), strict=True)) | {"all": float(np.median(table.sum(axis=1)))}
    found |= dict(zip(INNER, within.tolist(), strict=True))
    return found | {"nodes": float(np.median(grown[WARM_UP:]))}


def _timed(function, name: str, spent: Counter[str]):
    def timed(*args, **kwargs):
        began = time.perf_counter()
        result = function(*args, **kwargs)
        spent[name] += time.perf_counter() - began
        return result

    return timed


def _parts(times: Sequence[float]) -> np.ndarray | None:
    """Seconds of each part of a step: from its start to the datastore's call, to its return, to laying out, to its end, to the launch."""
    return np.diff(times) if len(times) == len(PARTS) + 1 else None  # a step that asks for no draft has fewer
