"""A method's real worker in this process: real requests, batches, verification, sampler and datastore, and no server.

Three things are small models of SGLang's: the target (a table), the KV cache (the token of each slot, which the target's
next token depends on) and the scheduler, with the lag of overlap scheduling or without. Every launch is checked: the roots,
the trees, their depth, the budget and the cached text.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from transformers import PretrainedConfig

from datastore_service.client import Datastore, open_datastore
from sglang_patches.cpu import ROWS_BY_REQUEST
from sglang_patches.draft_side.side import DraftParts
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.early_exit.tap import HostTap
from sglang_patches.methods.registry import DraftSurroundings, Method
from sglang_patches.namespace import namespace_of
from sglang_patches.step.decode import DecodeWorker
from tests.support.draft_side import InProcessDraftSide, follow_pairs
from tests.unit.verification.plain_decoding import (
    make_request,
    one_rank,
    plain_token,
    plain_tokens_of_batch,
    sampler_on_cpu,
)

EOS = 1
TOKENIZER = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS)
CONTEXT = 128
LOOKAHEAD = 4
# Given the number of token ids and what makes the parts that it drafts with.
DraftSideOf = Callable[[int, Callable[[], DraftParts]], DraftChannel]
DEADLINE_MS = "5000"  # a step waits for its draft however busy the machine: the same drafts in every run


@contextlib.contextmanager
def build_worker(
    method: Method,
    server_args: SimpleNamespace,
    target: Target,
    draft_side: DraftSideOf,
) -> Iterator[BaseSpecWorker]:
    """The method's worker, as a server makes it. The one place that knows how a method becomes a worker. draft_side: stands in for the
    draft process."""
    worker_class = DecodeWorker.of(method)
    stores: list[Datastore] = []  # of the draft side
    worker_class.start_draft = lambda worker: draft_side(
        worker.model_runner.model_config.vocab_size, draft_parts(worker, stores)
    )
    worker_class.make_tap = lambda worker: HostTap(target.model_runner, torch.nn.Identity(), 1)
    worker = worker_class(server_args=server_args, gpu_id=0, nccl_port=0, target_worker=target)
    worker.req_to_token_pool, worker.token_to_kv_pool_allocator = target.get_memory_pool()
    try:
        yield worker
    finally:
        if method.draft_process:
            worker.sources.channel.close()
        for store in (worker.sources.feed.datastore, *stores):
            store.close()


def draft_parts(worker: DecodeWorker, stores: list[Datastore]) -> Callable[[], DraftParts]:
    """Makes what the worker's method drafts with. stores: gets what it opens."""

    def open_store() -> Datastore:
        options = worker.options
        namespace = namespace_of(worker.server_args, options)
        vocab_size = worker.model_runner.model_config.vocab_size
        stores.append(
            open_datastore(options.endpoint, namespace, vocab_size, tenants=bool(options.request_tenant))
        )
        return stores[-1]

    around = DraftSurroundings(worker.options, LOOKAHEAD, worker.budget.nodes, open_store)
    return functools.partial(worker.method.draft_parts, around)


def in_process(vocabulary: int, parts: Callable[[], DraftParts]) -> DraftChannel:
    return InProcessDraftSide(follow_pairs, parts=parts)


class Markov:
    """Logits that depend on the last two tokens: what it says repeats its n-grams, as text does."""

    def __init__(self, vocabulary: int, seed: int = 0, scale: float = 2.0) -> None:
        rng = np.random.default_rng(seed)
        self.vocab = vocabulary
        self._table = torch.from_numpy(rng.normal(scale=scale, size=(vocabulary,) * 3).astype(np.float32))

    def logits(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] after each pair of tokens, int64 [rows] each."""
        return self._table[before, last]

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [vocabulary] after a text, as `plain_decoding` wants them."""
        before = tokens[-2] if len(tokens) > 1 else 0
        return self.logits(torch.tensor([before]), torch.tensor([tokens[-1]]))[0]


class Counting(Markov):
    """Counts upwards: no token comes twice, so that nothing can be drafted which has not been read elsewhere."""

    def __init__(self, vocabulary: int) -> None:
        self.vocab = vocabulary

    def logits(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot((last + 1) % self.vocab, self.vocab).float()


class Layer(torch.nn.Module):
    """Hands out what it begins with, as SGLang's decoder layers do, and changes nothing."""

    def forward(self, positions, hidden_states, forward_batch, capture_output=None) -> torch.Tensor:
        if capture_output is not None:
            capture_output(hidden_states)
        return hidden_states


class Layered(torch.nn.Module):
    """Two layers and an output head. Its hidden states are logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.lm_head = torch.nn.Identity()
        self.logits_processor = SimpleNamespace(_compute_lm_head=lambda states, head: states)

    def run(self, states: torch.Tensor, batch: ScheduleBatch) -> None:
        for layer in self.model.layers:
            layer(None, states, batch)


class KvCache:
    """The token of each slot."""

    def __init__(self, slots: int) -> None:
        self.tokens = torch.full((slots,), -1)

    def move_kv_cache(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.tokens[target] = self.tokens[source]


class Target:
    """The target model's worker. texts: of the running requests, what has been emitted and not been processed included.
    drafted: nodes it has verified."""

    def __init__(self, model: Markov, size: int) -> None:
        config = SimpleNamespace(
            vocab_size=model.vocab,
            context_len=CONTEXT,
            hf_config=PretrainedConfig(),
            linear_attn_registry_result=None,
        )
        self.model_runner = SimpleNamespace(
            model=Layered(), model_config=config, dtype=torch.float32, device="cpu", sampler=Sampler()
        )
        self.texts: dict[Req, list[int]] = {}
        self.drafted = 0
        self._model = model
        room = CONTEXT + 64  # a tree may lie behind a request's last token
        self._slots = torch.randperm(size * room, generator=torch.Generator().manual_seed(0)).view(size, room)
        self._kv = KvCache(size * room)

    def get_memory_pool(self) -> tuple[SimpleNamespace, SimpleNamespace]:
        table = SimpleNamespace(req_to_token=self._slots.to(torch.int32))
        return table, SimpleNamespace(get_kvcache=lambda: self._kv)

    def forward_batch_generation(
        self, batch: ScheduleBatch, is_verify: bool = False
    ) -> GenerationBatchResult:
        return self._verify(batch) if is_verify else self._prefill(batch)

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        texts = [self.texts[req] for req in batch.reqs]
        for row, text in zip(batch.req_pool_indices.tolist(), texts, strict=True):
            self._kv.tokens[self._slots[row, : len(text)]] = torch.tensor(text)
        output = LogitsProcessorOutput(next_token_logits=torch.stack([self._model(text) for text in texts]))
        info = batch.sampling_info.copy_for_forward()
        info.apply_logits_bias(output.next_token_logits)
        last = batch.seq_lens - 1
        none = [0] * len(texts), [None] * len(texts)
        tokens = self.model_runner.sampler(output, info, False, *none, last)
        return GenerationBatchResult(logits_output=output, next_token_ids=tokens, can_run_cuda_graph=False)

    def _verify(self, batch: ScheduleBatch) -> GenerationBatchResult:
        given, size = batch.spec_info, len(batch.reqs)
        shape = size, given.draft_token_num
        widths = torch.tensor(getattr(given, ROWS_BY_REQUEST, [shape[1]] * size))
        there = torch.arange(shape[1]) < widths[:, None]  # nodes that have a row
        assert len(batch.input_ids) == len(given.positions) == len(batch.out_cache_loc) == there.sum()
        assert not (given.retrieve_next_token >= widths[:, None]).any(), "a node of a tree has no row"
        tokens, positions = torch.zeros((2, *shape), dtype=torch.int64)
        tokens[there], positions[there] = batch.input_ids, given.positions
        mask = given.custom_mask.view(*shape, -1)
        self._check_cache(batch, tokens)
        self._check_trees(given, tokens, positions, mask, batch.seq_lens)
        self._kv.tokens[batch.out_cache_loc] = batch.input_ids
        before_root = self._kv.tokens[self._slots[batch.req_pool_indices, batch.seq_lens - 1]]
        # A row's parent: of the rows it attends to, the last one but itself.
        others = mask & ~torch.eye(shape[1], dtype=torch.bool)
        parents = (others * (positions[:, None] + 1)).argmax(dim=2)
        before = torch.where(others.any(dim=2), tokens.gather(1, parents), before_root[:, None])
        logits = self._model.logits(before[there], tokens[there])
        # After one layer the target takes each token for its neighbour, wherever it has read an odd one.
        odd = (tokens[there] % 2 == 1)[:, None]
        self.model_runner.model.run(torch.where(odd, logits.roll(1, dims=1), logits), batch)
        output = LogitsProcessorOutput(next_token_logits=logits.clone())
        return GenerationBatchResult(logits_output=output, can_run_cuda_graph=False)

    def _check_cache(self, batch: ScheduleBatch, tokens: torch.Tensor) -> None:
        for row, (req, index, length) in enumerate(
            zip(batch.reqs, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True)
        ):
            text = self.texts[req]
            assert len(text) == length + 1
            assert self._kv.tokens[self._slots[index, :length]].tolist() == text[:-1], (
                "another text is cached"
            )
            assert int(tokens[row, 0]) == text[-1], "the root is not the last token"

    def _check_trees(
        self,
        given: NgramVerifyInput,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        assert ((tokens >= 0) & (tokens < self._model.vocab)).all()
        links = given.retrieve_next_token.tolist(), given.retrieve_next_sibling.tolist()
        for row, length in enumerate(lengths.tolist()):
            paths = {0: [0]}  # of the linked nodes
            for node, parent in _linked(links[0][row], links[1][row]):
                assert node not in paths, "a node has two parents"
                paths[node] = [*paths[parent], node]
                assert mask[row, node].nonzero().flatten().tolist() == sorted(paths[node])
                assert int(positions[row, node]) == length + len(paths[node]) - 1
                assert int(positions[row, node]) < CONTEXT - 1, "the next root would lie beyond the context"
            said = [tuple(tokens[row, path].tolist()) for path in paths.values()]
            assert len(set(said)) == len(said), "two siblings have one token"
            self.drafted += len(paths) - 1


def _linked(first_child: Sequence[int], next_sibling: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(node, its parent) of all nodes that a walk can reach, parents first."""
    waiting = deque([0])
    while waiting:
        parent = waiting.popleft()
        node = first_child[parent]
        while node != -1:
            yield node, parent
            waiting.append(node)
            node = next_sibling[node]


_names = itertools.count()


def request(prompt: Sequence[int], vocabulary: int, **sampling) -> Req:
    """sampling: SGLang's sampling parameters; greedy unless they say otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 40, **sampling})
    params.normalize(TOKENIZER)
    req = Req(
        rid=f"in-process-{next(_names)}",
        origin_input_text="",
        origin_input_ids=array("q", prompt),
        sampling_params=params,
        eos_token_ids={EOS},
        vocab_size=vocabulary,
    )
    req.tokenizer = TOKENIZER
    return req


def output_of(req: Req) -> list[int]:
    return list(req.output_ids[: req.finished_len])


def plain_answer(model: Markov, prompt: Sequence[int], **sampling) -> list[int]:
    """Plain decoding's, a token at a time. It is the same for every method, and made once."""
    return list(_plain_answer(model, tuple(prompt), json.dumps(sampling, sort_keys=True)))


@functools.cache
def _plain_answer(model: Markov, prompt: tuple[int, ...], wanted: str) -> list[int]:
    """wanted: sampling parameters as JSON."""
    sampling = json.loads(wanted)
    req = request(prompt, model.vocab, **sampling)
    oracle = make_request(prompt, (), **{"temperature": 0.0, **sampling})
    with sampler_on_cpu(deterministic="sampling_seed" in sampling) as sampler:
        while not req.finished():
            oracle.output_ids.append(plain_token(model, sampler, oracle, [])[0])
            req.output_ids.append(oracle.output_ids[-1])
            req.update_finish_state(1)
    return output_of(req)


def plain_answers(model: Markov, prompts: Sequence[Sequence[int]], kinds: Sequence[dict]) -> list[list[int]]:
    """Plain decoding's of one batch with seeds, in which SGLang draws for each request as the others' filters have it. No penalties."""
    reqs = [request(prompt, model.vocab, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]
    oracles = {
        req: make_request(prompt, (), **{"temperature": 0.0, **kind})
        for req, prompt, kind in zip(reqs, prompts, kinds, strict=True)
    }
    with sampler_on_cpu(deterministic=True) as sampler:
        while running := [req for req in reqs if not req.finished()]:
            texts = [[*req.origin_input_ids, *req.output_ids] for req in running]
            tokens = plain_tokens_of_batch(model, sampler, [oracles[req] for req in running], texts)
            for req, token in zip(running, tokens, strict=True):
                req.output_ids.append(token)
                req.update_finish_state(1)
    return [output_of(req) for req in reqs]


@dataclass(eq=False)
class Place:
    """A request in the batch. text: with what is emitted and not processed. relay: emitted by its last step."""

    req: Req
    row: int
    text: list[int]
    relay: list[int] = field(default_factory=list)


class Scheduler:
    """lags: the results of a step are processed when the next one is launched, as overlap scheduling has it; `with_grammar`: when
    the next one's batch is made, and before it is launched, as for a batch with a grammar."""

    def __init__(self, worker: BaseSpecWorker, target: Target, size: int, lags: bool) -> None:
        self.worker, self.target = worker, target
        self.with_grammar = False
        self.steps = 0  # decode steps, one a request
        self.emitted = 0  # by them
        self._lag = int(lags)
        self._free = list(range(size))
        self._waiting: deque[Req] = deque()
        self._running: list[Place] = []
        self._unprocessed: deque[list[tuple[Place, list[int]]]] = deque()

    def answers(self, reqs: Sequence[Req], every_step: Callable[[], None] = lambda: None) -> list[list[int]]:
        """Of these requests, all added at once; `every_step` is called between steps."""
        self._waiting.extend(reqs)
        while self._waiting or self._running or self._unprocessed:
            self.step()
            every_step()
        return [output_of(req) for req in reqs]

    def step(self) -> None:
        if self._waiting and self._free:
            self._prefill()
        elif self._running:
            self._decode()
        self._process(self._lag if self._running else 0)

    def retract(self, place: int) -> None:
        """Its KV is given up, and what its last step emitted unless that is processed, and its whole output if SGLang says so; it is
        prefilled again."""
        gone = self._running[place]
        self._remove(gone)
        gone.req.reset_for_retract()
        self._waiting.append(gone.req)

    def abort(self, req: Req) -> None:
        self._remove(next(place for place in self._running if place.req is req))
        self.worker.note_request_finished(rid=req.rid, natural_stop=False)

    def add(self, req: Req) -> None:
        self._waiting.append(req)

    @property
    def running(self) -> list[Req]:
        return [place.req for place in self._running]

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps

    def _prefill(self) -> None:
        places = []
        while self._waiting and self._free:
            req = self._waiting.popleft()
            places.append(Place(req, self._free.pop(), [*req.origin_input_ids, *req.output_ids]))
        self._running += places
        self.target.texts |= {place.req: place.text for place in places}
        result = self.worker.forward_batch_generation(self._batch(places, ForwardMode.EXTEND))
        self._emit(places, [[token] for token in result.next_token_ids.tolist()])

    def _decode(self) -> None:
        places = list(self._running)
        if self.with_grammar:
            self._process(0)
        result = self.worker.forward_batch_generation(self._batch(places, ForwardMode.DECODE))
        tokens = result.next_draft_input.accept_tokens.view(len(places), -1).tolist()
        emitted = [row[:count] for row, count in zip(tokens, result.accept_lens.tolist(), strict=True)]
        self.steps += len(places)
        self.emitted += sum(map(len, emitted))
        self._emit(places, emitted)

    def _emit(self, places: Sequence[Place], emitted: Sequence[list[int]]) -> None:
        for place, tokens in zip(places, emitted, strict=True):
            place.text += tokens
            place.relay = tokens
        self._unprocessed.append(list(zip(places, emitted, strict=True)))

    def _process(self, left: int) -> None:
        while len(self._unprocessed) > left:
            for place, tokens in self._unprocessed.popleft():
                if place in self._running:
                    self._take(place, tokens)

    def _take(self, place: Place, tokens: list[int]) -> None:
        place.req.output_ids.extend(tokens)
        place.req.update_finish_state(len(tokens))
        if place.req.finished():
            self._remove(place)
            self.worker.note_request_finished(rid=place.req.rid, natural_stop=True)

    def _remove(self, place: Place) -> None:
        self._running.remove(place)
        self._free.append(place.row)

    def _batch(self, places: Sequence[Place], mode: ForwardMode) -> ScheduleBatch:
        decoding = mode == ForwardMode.DECODE
        lengths = torch.tensor([len(place.text) - decoding for place in places])
        batch = ScheduleBatch(
            reqs=[place.req for place in places],
            req_to_token_pool=self.worker.req_to_token_pool,
            device="cpu",
            forward_mode=mode,
            req_pool_indices=torch.tensor([place.row for place in places]),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            spec_info=self._relayed(places, lengths) if decoding else None,
        )
        batch.sampling_info = SamplingBatchInfo.from_schedule_batch(
            batch, self.worker.model_runner.model_config.vocab_size
        )
        return batch

    def _relayed(self, places: Sequence[Place], lengths: torch.Tensor) -> NgramVerifyInput:
        width = self.worker.max_width
        tokens = torch.zeros(len(places), width, dtype=torch.int32)
        for row, place in enumerate(places):
            tokens[row, : len(place.relay)] = torch.tensor(place.relay, dtype=torch.int32)
        return NgramVerifyInput(
            draft_token_num=width,
            accept_tokens=tokens.flatten(),
            accept_lens=torch.tensor([len(place.relay) for place in places], dtype=torch.int32),
            new_seq_lens=lengths,
        )


class Workbench:
    """Workers of one method over one model. tokenizer: folder with the `tokenizer.json` that names their namespace. draft_side: in the
    place of a draft process."""

    def __init__(
        self,
        method: Method,
        tokenizer: Path,
        draft_side: DraftSideOf = in_process,
    ) -> None:
        self._method, self._tokenizer, self._draft_side = method, tokenizer, draft_side

    @contextlib.contextmanager
    def scheduler(
        self,
        model: Markov,
        *,
        lags: bool,
        nodes: int = 7,
        size: int = 8,
        endpoint: str = "embedded",
        tenant: str = "",
        request_tenant: str = "",
        seeded: bool = False,
        late: bool = False,
        adaptive: bool = False,
    ) -> Iterator[Scheduler]:
        """With a worker of its own. nodes: most drafted tokens a step. size: most requests at a time. request_tenant: where requests name
        their tenants. seeded: requests draw by their seeds. late: the host has a step's tokens when the next one begins, as on an
        accelerator. adaptive: steps have several widths."""
        arguments = SimpleNamespace(
            disaggregation_mode="null",
            served_model_name=None,
            model_path=str(self._tokenizer),
            tokenizer_path=None,
            revision=None,
            speculative_draft_model_path=str(self._tokenizer),
        )
        length = "adaptive" if adaptive else "static"
        with _configured(nodes, endpoint, tenant, request_tenant, seeded, length):
            target = Target(model, size)
            with build_worker(self._method, arguments, target, self._draft_side) as worker:
                if late:
                    worker.tokens_known = lambda step: None
                yield Scheduler(worker, target, size, lags)


@contextlib.contextmanager
def _configured(
    nodes: int, endpoint: str, tenant: str, request_tenant: str, seeded: bool, length: str
) -> Iterator[None]:
    """SGLang's and the plugin's settings of a worker in this process."""
    width = nodes + 1
    options = {"NODES": str(nodes), "ENDPOINT": endpoint, "TENANT": tenant, "REQUEST_TENANT": request_tenant}
    options |= {"LENGTH": length, "DEADLINE_MS": DEADLINE_MS, "PUBLISH": "on"}
    with (
        mock.patch.dict(os.environ, {f"SPECSTORE_{name}": value for name, value in options.items()}),
        get_context().override_server_args(
            device="cpu",
            page_size=1,
            attention_backend="specstore_cpu",
            sampling_backend="pytorch",
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=width,
            speculative_num_steps=max(1, width // 2),
            speculative_eagle_topk=2,
        ),
        get_exec().deterministic.override(enable_deterministic_inference=seeded),
        mock.patch("datastore_service.client.GREETING_SECONDS", 60.0),  # a busy machine connects late
        torch.compiler.set_stance("force_eager"),  # changes no arithmetic
        one_rank(),
    ):
        yield
