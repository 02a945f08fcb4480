"""The head's tree and retrieval's as one tree, of the nodes that are likeliest to be accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.union import Estimate, Part, unions
from sglang_patches.head.worth import HeadWorth
from sglang_patches.step.sources import Sources, States

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

Draft = Callable[["ScheduleBatch"], list[DraftTree]]


class BesideHead(Sources):
    """Retrieval is asked, the head drafts while that answers, and both trees are united. Where the last step's retrieval was worth a step
    without the head's forwards, its answer is waited for first.

    draft: the head's, on every tensor-parallel rank.
    retrieval: what drafts without the head, on the first rank; it is called in a thread of its own.
    estimate: of the trees' acceptance.
    agreed: the first rank's answer, on all ranks.
    budget: of the united tree.
    worth: whether a step waits for the head; None if every step does.
    """

    def __init__(
        self,
        draft: Draft,
        retrieval: Sources,
        estimate: Estimate,
        agreed: Callable[[bool], bool],
        budget: Budget,
        worth: HeadWorth | None,
    ) -> None:
        self._draft, self._retrieval = draft, retrieval
        self._estimate, self._agreed, self._budget = estimate, agreed, budget
        self._asker = ThreadPoolExecutor(1, "specstore-ask")
        self._worth = worth
        self.followers = retrieval.followers

    def propose(
        self, batch: ScheduleBatch, states: States, depths: Sequence[int], wanted: bool
    ) -> list[DraftTree]:
        tenants = [state.tenant for state in states]
        asked = self._asker.submit(self._retrieval.propose, batch, states, depths, wanted)
        if not self._agreed(wanted and self._pays(asked, tenants)):
            return asked.result()
        began = time.perf_counter()
        drafted = self._draft(batch)
        took = time.perf_counter() - began
        retrieved = asked.result()
        united = self._united(drafted, retrieved, tenants)
        if self._worth is not None:
            self._worth.drafted(self._tokens(retrieved, tenants), self._tokens(united, tenants), took)
        return united

    def step_took(self, seconds: float) -> None:
        self._retrieval.step_took(seconds)
        if self._worth is not None:
            self._worth.step_took(seconds)

    def _pays(self, asked: Future[list[DraftTree]], tenants: Sequence[str]) -> bool:
        """Whether the head drafts in this step. Retrieval's answer is waited for only where it may be enough."""
        if self._worth is None or not self._worth.doubtful:
            return True
        return self._worth.pays(self._tokens(asked.result(), tenants))

    def _tokens(self, trees: Sequence[DraftTree], tenants: Sequence[str]) -> float:
        """Expected of a step with these trees, a request."""
        return 1 + float(self._estimate(trees, tenants).sum()) / len(trees)

    def _united(
        self, drafted: Sequence[DraftTree], retrieved: Sequence[DraftTree], tenants: Sequence[str]
    ) -> list[DraftTree]:
        pairs = list(zip(drafted, retrieved, strict=True))
        trees = [tree for pair in pairs for tree in pair]
        chances = self._estimate(trees, np.repeat(tenants, 2).tolist())
        parts = [[Part(tree) for tree in pair] for pair in pairs]
        return unions(parts, trees, chances, self._budget.nodes, self._budget.children)
