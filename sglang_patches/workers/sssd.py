"""SSSD: every decode step asks the datastore for trees, one message for the whole batch (paper section 3)."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from sglang.srt.runtime_context import get_parallel

from datastore_service.client import Datastore, open_datastore
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import NO_DRAFT, Budget, Entry
from sglang_patches.disaggregation.shared_session import shared_session
from sglang_patches.namespace import namespace_of
from sglang_patches.options import load_options
from sglang_patches.tree_attention import ANY_WIDTH_BACKENDS, verifies_chains_only, verifying_backend
from sglang_patches.workers.base import TreeWorker
from sglang_patches.workers.layout import pack
from sglang_patches.workers.length import CANDIDATE_WIDTHS, LengthPolicy
from sglang_patches.workers.metrics import RETRIEVE, PhaseClock, observe_step
from sglang_patches.workers.requests import RequestTracker
from sglang_patches.workers.row_cost import measure_row_seconds
from sglang_patches.workers.target_sampling import needs_plain_step
from sglang_patches.workers.width_graphs import MOST_ROWS, WidthGraphs, captures_decode_graphs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 30.0


class _Launch(NamedTuple):
    """Of the step that is being launched. began: by perf_counter."""

    trees: list[DraftTree]
    width: int
    began: float


class SSSDWorker(TreeWorker):
    """Rank 0 talks to the datastore, the other tensor-parallel ranks verify what it got."""

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.options = load_options()
        vocab_size = self.model_runner.model_config.vocab_size
        self.deadline = self.options.deadline_ms / 1e3
        nodes = self.max_width - 1
        self.budget = Budget(
            nodes, depth=nodes, children=1 if verifies_chains_only(self.model_runner) else nodes
        )
        self.policy = self._length_policy()
        self.tracker = RequestTracker(
            vocab_size,
            self.options.publish == "on",
            needs_plain_step,
            self.policy.acceptance.observe,
            shared_session if server_args.disaggregation_mode == "decode" else lambda req: None,
        )
        self._last_sweep = time.monotonic()
        self.datastore: Datastore | None = None
        if get_parallel().tp_rank == 0:
            self.datastore = open_datastore(
                self.options.endpoint,
                namespace_of(server_args, self.options),
                vocab_size,
                prior=self.options.prior or None,
                tls=self.options.tls(),
            )
            logger.info(
                "specstore: drafting from %s, up to %d nodes", self.options.endpoint, self.budget.nodes
            )

    def clear_cache_pool(self) -> None:
        self._post([Entry(session, closing=True) for session in self.tracker.clear()])

    def observe_prefill(self, batch: ScheduleBatch) -> None:
        self.policy.interrupted()
        self._post(self.tracker.opening_entries(batch.reqs))

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        entry = self.tracker.closing_entry(rid)
        if entry is not None:
            self._post([entry])

    def draft_batch(
        self, batch: ScheduleBatch, lengths: list[int], pending: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        trees, roots = self._trees(batch.reqs, lengths, pending)
        trees = [
            tree.no_deeper(self.deepest_node(length)) for tree, length in zip(trees, lengths, strict=True)
        ]
        width = int(self.broadcast_from_first_rank(np.array([self.policy.choose(trees)]))[0])
        packed = self.broadcast_from_first_rank(pack(trees, width))
        self._launch = _Launch(trees, width, time.perf_counter())
        return packed, roots

    def after_launch(self, batch: ScheduleBatch) -> None:
        trees, width, began = self._launch
        self.tracker.learn()
        if width > 1:
            self.tracker.note_drafted(batch.reqs, [tree.first(width - 1) for tree in trees])
        finished = self.policy.step_started(len(trees), width, not batch.after_idle_gap, began)
        if finished is not None:
            observe_step(*finished)
        self._sweep()

    def _trees(
        self, reqs: list[Req], lengths: list[int], pending: list[list[int]]
    ) -> tuple[list[DraftTree], np.ndarray]:
        """Drafts where they are likely to pay, and the roots. The datastore hears nothing of a step that needs nothing
        of it: the next entries carry its tokens."""
        wanted = self.policy.wants_draft(len(reqs))
        if not wanted and not self.tracker.has_news(reqs):
            return [EMPTY_TREE] * len(reqs), self.tracker.roots(reqs, lengths, pending)
        entries, roots = self.tracker.step_entries(
            reqs, lengths, pending, self.budget if wanted else NO_DRAFT
        )
        return self._ask(entries), roots

    def _length_policy(self) -> LengthPolicy:
        widths, most_rows = self._widths()
        if len(widths) == 1:
            return LengthPolicy(widths, lambda rows: 1.0)
        seconds = measure_row_seconds(self.model_runner.model, self.model_runner.dtype, self.device)
        return LengthPolicy(widths, seconds, most_rows)

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

    def _ask(self, entries: list[Entry]) -> list[DraftTree]:
        if self.datastore is None:
            return [EMPTY_TREE] * len(entries)
        clock = PhaseClock()
        replies = self.datastore.step(entries, self.deadline)
        clock.end(RETRIEVE)
        return [reply.tree for reply in replies]

    def _post(self, entries: list[Entry]) -> None:
        if entries and self.datastore is not None:
            self.datastore.post(entries)

    def _sweep(self) -> None:
        if time.monotonic() - self._last_sweep > SWEEP_SECONDS:
            self._last_sweep = time.monotonic()
            self._post(self.tracker.unseen_entries())
