"""Decoding with any of the methods: what all of them need, around the parts that a method brings."""

from __future__ import annotations

import functools
import logging
import math
import time
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_parallel

from datastore_service.client import open_datastore
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import NO_DRAFT, Budget
from sglang_patches.draft_process.arguments import given_of
from sglang_patches.draft_process.settings import draft_settings
from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.speculation import Choices, Speculation
from sglang_patches.early_exit.loading import make_tap
from sglang_patches.early_exit.read_rows import likeliest_ends
from sglang_patches.early_exit.tap import Draws, Tap
from sglang_patches.exchange.messages import Sampling
from sglang_patches.host.versions import host
from sglang_patches.ledger import verified
from sglang_patches.ledger.outcome import Outcome
from sglang_patches.ledger.requests import RequestBook, RequestState, Step, tenants_of
from sglang_patches.ledger.shared_session import shared_session
from sglang_patches.methods.mirror import MOST, choices_of
from sglang_patches.methods.registry import Method, Parts, Surroundings
from sglang_patches.metrics import observe_step
from sglang_patches.namespace import namespace_of
from sglang_patches.options import load_options
from sglang_patches.start.row_cost import measure_row_seconds
from sglang_patches.start.tree_attention import ANY_WIDTH_BACKENDS, verifies_chains_only, verifying_backend
from sglang_patches.step import finish_hooks
from sglang_patches.step.base import TreeWorker
from sglang_patches.step.courier import Courier, make_courier
from sglang_patches.step.length import CANDIDATE_WIDTHS, LengthPolicy
from sglang_patches.step.start_draft import start_draft_process
from sglang_patches.step.width_graphs import MOST_ROWS, WidthGraphs, captures_decode_graphs
from sglang_patches.verification.layout import TreeLayout, pack, pack_reached
from sglang_patches.verification.target_sampling import needs_plain_step

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 30.0


class _Launch(NamedTuple):
    """Of the step that is being launched. packed: as from `pack`. began: by perf_counter."""

    states: list[RequestState]
    trees: list[DraftTree]
    packed: np.ndarray
    width: int
    began: float


class DecodeWorker(TreeWorker):
    """The first tensor-parallel rank drafts, the others verify what it drafted. `parts` and `datastore` are None on those."""

    method: ClassVar[Method]

    @classmethod
    def of(cls, method: Method) -> type[DecodeWorker]:
        return type(f"{cls.__name__}[{method.name}]", (cls,), {"method": method})

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker, self.method.verifier)
        finish_hooks.tell(self)
        self.options = load_options()
        vocab_size = self.model_runner.model_config.vocab_size
        nodes = self.max_width - 1
        self.budget = Budget(
            nodes, depth=nodes, children=1 if verifies_chains_only(self.model_runner) else nodes
        )
        self.policy = self._length_policy()
        self.book = RequestBook(
            vocab_size,
            self.options.publish == "on",
            tenants_of(self.options),
            needs_plain_step,
            shared_session if server_args.disaggregation_mode == "decode" else lambda req: None,
        )
        self._last_sweep = time.monotonic()
        self._not_learned: list[Outcome] = []
        self._counted = 0  # of these
        self.datastore: DatastoreFeed | None = None
        self.parts: Parts | None = None
        self.speculation: Speculation | None = None
        self.courier: Courier | None = None
        self.tap = self._make_tap(server_args) if self.method.early_exit else None
        if self.first_rank:
            self._make_parts(server_args, vocab_size)

    def _make_parts(self, server_args: ServerArgs, vocab_size: int) -> None:
        options = self.options
        namespace = namespace_of(server_args, options)
        store = open_datastore(
            options.endpoint,
            namespace,
            vocab_size,
            prior=options.prior or None,
            tls=options.tls(),
            tenants=bool(options.request_tenant),
        )
        self.datastore = DatastoreFeed(store, options.deadline_ms / 1e3)
        self.parts = self.method.parts(
            Surroundings(
                options,
                self.datastore,
                self.budget,
                self.policy.acceptance.estimate,
                lambda: self.start_draft(vocab_size),
                bool(server_args.speculative_draft_model_path),
            )
        )
        if self.parts.channel is not None:
            self.speculation = Speculation(
                self.parts.channel, self.budget.nodes, self._sampling_of, vocabulary=vocab_size
            )
            self.courier = make_courier(self.device)
        logger.info(
            "specstore: %s, %s; datastore %s, up to %d nodes",
            self.method.name,
            self.method.summary,
            options.endpoint,
            self.budget.nodes,
        )

    def _make_tap(self, server_args: ServerArgs) -> Tap:
        view = resolved_view(server_args)
        rows = self.options.draft_rows
        return make_tap(self.options, self.model_runner, rows, MOST, view.model_path, view.revision)

    def start_draft(self, vocab_size: int) -> DraftChannel:
        """Starts the draft process and waits for it: the target's KV cache gets what memory it leaves."""
        context_length = self.last_position + 1
        args, namespace = self.server_args, namespace_of(self.server_args, self.options)
        replica = host.replica_of(self.model_runner) or 0
        settings = draft_settings(
            resolved_view(args),
            given_of(args),
            self.options,
            self.method,
            namespace,
            context_length,
            vocab_size,
            replica,
        )
        return start_draft_process(settings)

    def _sampling_of(self, state: RequestState) -> Sampling:
        wishes = state.req.sampling_params
        noise = self.verifier.seed_of(state.req)
        return Sampling(wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p, noise, state.ends)

    @property
    def _feeds(self) -> list[DatastoreFeed | Speculation]:
        """Who is told of each request."""
        return [feed for feed in (self.datastore, self.speculation) if feed is not None]

    # Requests come and go

    def observe_prefill(self, batch: ScheduleBatch) -> None:
        self.policy.interrupted()
        opened = self.book.open(batch.reqs)
        for feed in self._feeds:
            feed.open(opened)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's own call, for the ends that a decode step brings."""
        self._closed(self.book.close(rid))

    def request_ended(self, req: Req) -> None:
        """For all other ends, also of requests that have not begun."""
        self._closed(self.book.end(req))

    def _closed(self, state: RequestState | None) -> None:
        if state is None:
            return
        self._not_learned += self.book.settle([state])
        self._count()
        for feed in self._feeds:
            feed.close([state])

    def clear_cache_pool(self) -> None:
        states = self.book.clear()
        for feed in self._feeds:
            feed.drop(states)

    def _sweep(self) -> None:
        if time.monotonic() - self._last_sweep > SWEEP_SECONDS:
            self._last_sweep = time.monotonic()
            for req in self.book.unseen():
                self.request_ended(req)

    # A decode step, in this order

    def draft_batch(self, batch: ScheduleBatch, step: Step) -> np.ndarray:
        states, taken_back = self.book.read(step)
        for feed in self._feeds if taken_back else ():
            feed.taken_back(taken_back)
        self._settle(states)
        depths = [self.deepest_node(length) for length in step.lengths]
        trees = [
            tree.no_deeper(depth) for tree, depth in zip(self._trees(states, depths), depths, strict=True)
        ]
        width = int(self.broadcast_from_first_rank(np.array([self._width_for(states, trees)]))[0])
        packed = self.broadcast_from_first_rank(pack(trees, width))
        self._launch = _Launch(states, trees, packed, width, time.perf_counter())
        return packed

    def verification_begins(self, layout: TreeLayout) -> None:
        """The early exit looks into steps that the draft side hears of. Tensor-parallel ranks compute it together: they cannot know what
        the first one told, and look into all."""
        if self.tap is None:
            return
        together = get_parallel().tp_group.world_size > 1
        if not (together or (self.speculation is not None and self.speculation.looked_up)):
            return
        states, trees, packed, width, _ = self._launch
        reached = pack_reached(trees, width)
        rows = self.broadcast_from_first_rank(likeliest_ends(packed, reached, self.options.draft_rows))
        requests = [
            (state.req.sampling_params.temperature, self.verifier.seed_of(state.req)) for state in states
        ]

        def expected(tokens: np.ndarray, probabilities: np.ndarray) -> None:
            if self.speculation is not None:
                self.speculation.expected(states, packed, Choices(rows, tokens, probabilities))

        draws = Draws.of_batch(requests, layout.positions, rows)
        self.tap.expect(draws, choices_of(len(states)), expected)

    def verification_launched(self, batch: ScheduleBatch) -> None:
        states, trees, _, width, began = self._launch
        self._count()
        self.policy.acceptance.learn(outcome for outcome in self._not_learned if outcome.request in self.book)
        self._not_learned.clear()
        self._counted = 0
        for state, tree in zip(states, trees, strict=True):
            state.tree = tree.first(width - 1)
        if self.speculation is not None:
            self.speculation.verification_launched(states)
        waited = self.speculation.seconds_waited() if self.speculation is not None else 0.0
        finished = self.policy.step_started(
            len(trees), width, not host.follows_idle_gap(batch), began, waited
        )
        if finished is not None and self.parts is not None:
            observe_step(*finished)
            self.parts.fallback.step_took(finished[2] - waited)
        self._sweep()

    def tokens_underway(self, accept_tokens: torch.Tensor, accept_lens: torch.Tensor) -> None:
        if self.courier is not None and self.speculation is not None:
            flight = self.speculation.launched(self._launch.states)
            receiver = functools.partial(self.speculation.outcomes_ahead, flight)
            self.courier.send(accept_tokens, accept_lens, receiver)

    def tokens_known(self, step: Step) -> None:
        self._settle(self.book.read_ahead(step))

    def outcomes_known(self, outcomes: list[Outcome]) -> None:
        """Called once for each verified step of a request, as soon as the host has its tokens: at the end of the step on a CPU,
        elsewhere when the request's next step begins."""
        for feed in self._feeds:
            feed.outcomes_known(outcomes)
        if self.parts is not None:
            self.parts.fallback.outcomes_known(outcomes)
        self._not_learned += outcomes

    def _count(self) -> None:
        news = self._not_learned[self._counted :]
        self._counted = len(self._not_learned)
        verified.count(news)
        for outcome in news:
            outcome.request.usage.add(outcome)

    def _settle(self, states: list[RequestState]) -> None:
        outcomes = self.book.settle(states)
        if outcomes:
            self.outcomes_known(outcomes)

    def _width_for(self, states: list[RequestState], trees: list[DraftTree]) -> int:
        return self.policy.choose(trees, [state.tenant for state in states])

    def _trees(self, states: list[RequestState], depths: list[int]) -> list[DraftTree]:
        """Drafts where they are likely to pay. The datastore hears nothing of a step that needs nothing of it: the next entries
        carry its tokens."""
        if self.parts is None or self.datastore is None:
            return [EMPTY_TREE] * len(states)
        if not self.policy.wants_draft(len(states)):
            if self.datastore.has_news(states):
                self.datastore.step(states, [NO_DRAFT] * len(states))
            return [EMPTY_TREE] * len(states)
        if self.speculation is None:
            return self.parts.fallback.trees(states, [EMPTY_TREE] * len(states))
        found = self.speculation.look_up(states, depths, self.parts.fallback.patience)
        fallen_back = self.parts.fallback.trees(states, found)
        self.speculation.proposed(states, fallen_back)
        tenants = [state.tenant for state in states]
        return self.policy.acceptance.better(found, fallen_back, tenants)

    # Speculation length

    def _length_policy(self) -> LengthPolicy:
        widths, most_rows = self._widths()
        if len(widths) == 1:
            return LengthPolicy(widths, lambda rows: 1.0)
        seconds = measure_row_seconds(self.model_runner.model, self.model_runner.dtype, self.device)
        return LengthPolicy(widths, seconds, most_rows)

    def most_rows(self, batch: int) -> int:
        return self.policy.most_rows(batch)

    def _widths(self) -> tuple[tuple[int, ...], float]:
        """The widths a step may have, ascending, and the rows it may have with any but the first."""
        if self.options.length == "static":
            return (self.max_width,), math.inf
        if captures_decode_graphs(self.device):
            self.width_graphs = WidthGraphs(self.model_runner, self.max_width)
            return self.width_graphs.widths, MOST_ROWS
        if verifying_backend() in ANY_WIDTH_BACKENDS:
            return (*(w for w in CANDIDATE_WIDTHS if w < self.max_width), self.max_width), math.inf
        return (self.max_width,), math.inf
