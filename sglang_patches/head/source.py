"""The head's tree and retrieval's as one tree, of the nodes that are likeliest to be accepted; and whether a step waits for the head, or
verifies what retrieval alone has found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.union import Estimate, Part, united
from sglang_patches.ledger.rates import RunningMean
from sglang_patches.ledger.requests import DraftSource
from sglang_patches.step.sources import Sources, States

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


Draft = Callable[["ScheduleBatch"], list[DraftTree]]

RATE = 0.05  # of the running means
ALIKE = 20  # values that count alike, before the means run
LEVELS = 8  # of what retrieval promises: each has a mean of its own
PROBE_STEPS = 8  # after so many steps without it, the head drafts again


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
        drafted = [
            tree if state.takes_from(DraftSource.HEAD) else EMPTY_TREE
            for state, tree in zip(states, self._draft(batch), strict=True)
        ]
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
        parts = [[Part(tree) for tree in pair] for pair in zip(drafted, retrieved, strict=True)]
        return united(parts, tenants, self._estimate, self._budget)


class HeadWorth:
    """Learns what the head adds to a step, and what it takes.

    A step's tokens are those that its trees are expected to bring, the target's own included, a request.
    """

    def __init__(self) -> None:
        self._gains = [RunningMean(RATE, ALIKE) for _ in range(LEVELS)]
        self._draft, self._step = RunningMean(RATE, ALIKE), RunningMean(RATE, ALIKE)
        self._left_out = 0  # steps in a row
        self._drafted = False  # in this step
        self._last = 1.0  # tokens of the last step's retrieval

    @property
    def doubtful(self) -> bool:
        """Whether retrieval should be heard before the head drafts: after a step in which that alone was worth it."""
        return not self._pays(self._last)

    def pays(self, retrieved: float) -> bool:
        """Whether a step with the head is likely to bring more tokens a second.

        retrieved: tokens of a step with retrieval alone.
        """
        self._last = retrieved
        if self._pays(retrieved) or self._left_out >= PROBE_STEPS:
            self._left_out = 0
            return True
        self._left_out += 1
        return False

    def drafted(self, retrieved: float, united: float, seconds: float) -> None:
        """The head has drafted.

        retrieved, united: tokens of the step with retrieval alone, and with both.
        seconds: that the head's forwards took.
        """
        self._last, self._left_out, self._drafted = retrieved, 0, True
        self._gain(retrieved).add(united - retrieved)
        self._draft.add(seconds)

    def step_took(self, seconds: float) -> None:
        """A step took so long, the head's forwards included if it drafted: others say nothing of what those cost."""
        if self._drafted:
            self._step.add(seconds)
        self._drafted = False

    def _pays(self, retrieved: float) -> bool:
        gain, draft, step = self._gain(retrieved), self._draft.value, self._step.value
        if gain.count < ALIKE or draft >= step:  # nothing is known yet
            return True
        return (retrieved + gain.value) * (step - draft) >= retrieved * step

    def _gain(self, retrieved: float) -> RunningMean:
        return self._gains[min(int(retrieved - 1), LEVELS - 1)]
