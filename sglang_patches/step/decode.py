"""Decoding with any of the methods: what becomes of requests and steps, around the parts that a method brings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_patches.host.versions import host
from sglang_patches.ledger.requests import RequestState, Step
from sglang_patches.metrics import observe_step
from sglang_patches.step import ends
from sglang_patches.step.assembly import Launch, MethodWorker
from sglang_patches.step.epoch import EPOCH
from sglang_patches.verification.layout import TreeLayout, pack

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

SWEEP_SECONDS = 30.0


class DecodeWorker(MethodWorker):
    """The first tensor-parallel rank drafts, the others verify what it drafted."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        ends.tell(self)
        self._last_sweep = time.monotonic()
        self._epoch = EPOCH.now()

    # Requests come and go

    def observe_prefill(self, batch: ScheduleBatch) -> None:
        self.policy.interrupted()
        opened = self.book.open(batch.reqs)
        if EPOCH.now() != self._epoch:
            self._epoch = EPOCH.now()
            self.policy.acceptance.weights_changed()
        for follower in self.followers:
            follower.open(opened)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's own call, for the ends that a decode step brings."""
        self._closed(self.book.close(rid))

    def request_ended(self, req: Req) -> None:
        """For all other ends, also of requests that have not begun."""
        self._closed(self.book.end(req))

    def _closed(self, state: RequestState | None) -> None:
        if state is None:
            return
        self.learning.heard(self.book.settle([state]))
        self.learning.count()
        for follower in self.followers:
            follower.close([state])

    def clear_cache_pool(self) -> None:
        states = self.book.clear()
        for follower in self.followers:
            follower.drop(states)

    def _sweep(self) -> None:
        if time.monotonic() - self._last_sweep > SWEEP_SECONDS:
            self._last_sweep = time.monotonic()
            for req in self.book.unseen():
                self.request_ended(req)

    # A decode step, in this order

    def draft_batch(self, batch: ScheduleBatch, step: Step) -> Launch:
        states, taken_back = self.book.read(step)
        for follower in self.followers if taken_back else ():
            follower.taken_back(taken_back)
        self._settle(states)
        depths = [self.deepest_node(length) for length in step.lengths]
        proposed = self.sources.propose(batch, states, depths, self.policy.wants_draft(len(states)))
        trees = [
            state.within_wish(tree.no_deeper(depth))
            for state, tree, depth in zip(states, proposed, depths, strict=True)
        ]
        widths = self.policy.choose(trees, [state.tenant for state in states])
        widths = self.broadcast_from_first_rank(widths)
        packed = self.broadcast_from_first_rank(pack(trees, widths))
        return Launch(packed, widths, states, trees, time.perf_counter())

    def verification_begins(self, drafted: Launch, layout: TreeLayout) -> None:
        """The early exit looks into steps that the draft side hears of. Tensor-parallel ranks compute it together: they cannot know what
        the first one told, and look into all."""
        if self.exit is None or not (self.sources.looked_up or get_parallel().tp_group.world_size > 1):
            return
        nodes = self.exit.nodes_of(drafted.packed, drafted.trees, drafted.widths)
        nodes = self.broadcast_from_first_rank(nodes)
        self.exit.read(drafted.states, drafted.packed, nodes, layout, self.sources.expected)

    def verification_launched(self, batch: ScheduleBatch, drafted: Launch) -> None:
        states, trees, widths = drafted.states, drafted.trees, drafted.widths
        self.learning.learn(self.book)
        for state, tree, width in zip(states, trees, widths.tolist(), strict=True):
            state.tree = tree.first(width - 1)
        waited = self.sources.launched(states)
        finished = self.policy.step_started(
            len(trees), int(widths.sum()), not host.follows_idle_gap(batch), drafted.began, waited
        )
        if finished is not None and self.first_rank:
            observe_step(*finished)
            self.sources.step_took(finished[2] - waited)
        self._sweep()

    def tokens_underway(
        self, drafted: Launch, accept_tokens: torch.Tensor, accept_lens: torch.Tensor
    ) -> None:
        self.sources.underway(drafted.states, accept_tokens, accept_lens)

    def tokens_known(self, step: Step) -> None:
        self._settle(self.book.read_ahead(step))

    def _settle(self, states: list[RequestState]) -> None:
        """Each verified step of a request ends here once, as soon as the host has its tokens: at the end of the step on a CPU, elsewhere when
        the request's next step begins."""
        outcomes = self.book.settle(states)
        for follower in self.followers if outcomes else ():
            follower.heard(outcomes)

    def most_rows(self, batch: int) -> int:
        return self.policy.most_rows(batch)
