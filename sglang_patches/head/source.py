"""The head's tree and retrieval's as one tree, of the nodes that are likeliest to be accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.union import Estimate, Part, unions
from sglang_patches.step.sources import Sources, States

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

Draft = Callable[["ScheduleBatch"], list[DraftTree]]


class BesideHead(Sources):
    """Retrieval is asked, the head drafts while that answers, and both trees are united.

    draft: the head's, on every tensor-parallel rank.
    retrieval: what drafts without the head, on the first rank; it is called in a thread of its own.
    estimate: of the trees' acceptance.
    agreed: the first rank's answer, on all ranks.
    budget: of the united tree.
    """

    def __init__(
        self,
        draft: Draft,
        retrieval: Sources,
        estimate: Estimate,
        agreed: Callable[[bool], bool],
        budget: Budget,
    ) -> None:
        self._draft, self._retrieval = draft, retrieval
        self._estimate, self._agreed, self._budget = estimate, agreed, budget
        self._asker = ThreadPoolExecutor(1, "specstore-ask")
        self.followers = retrieval.followers

    def propose(
        self, batch: ScheduleBatch, states: States, depths: Sequence[int], wanted: bool
    ) -> list[DraftTree]:
        wanted = self._agreed(wanted)
        asked = self._asker.submit(self._retrieval.propose, batch, states, depths, wanted)
        drafted = self._draft(batch) if wanted else None
        retrieved = asked.result()
        if drafted is None:
            return retrieved
        return self._united(drafted, retrieved, [state.tenant for state in states])

    def step_took(self, seconds: float) -> None:
        self._retrieval.step_took(seconds)

    def _united(
        self, drafted: Sequence[DraftTree], retrieved: Sequence[DraftTree], tenants: Sequence[str]
    ) -> list[DraftTree]:
        pairs = list(zip(drafted, retrieved, strict=True))
        trees = [tree for pair in pairs for tree in pair]
        chances = self._estimate(trees, np.repeat(tenants, 2).tolist())
        parts = [[Part(tree) for tree in pair] for pair in pairs]
        return unions(parts, trees, chances, self._budget.nodes, self._budget.children)
