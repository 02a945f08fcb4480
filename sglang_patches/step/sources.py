"""The sources of a step's drafts: none, the datastore, or a draft side beside it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import NO_DRAFT, Budget
from sglang_patches.drafting.datastore import DatastoreFeed
from sglang_patches.drafting.references import compile_references, with_references
from sglang_patches.drafting.seams import DraftChannel, Fallback
from sglang_patches.drafting.speculation import Choices, Speculation
from sglang_patches.drafting.union import Estimate, Part, best_trees, first_trees
from sglang_patches.ledger.outcome import Follower
from sglang_patches.ledger.requests import RequestState
from sglang_patches.step.courier import Courier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

States = Sequence[RequestState]


class Sources:
    """No source: that of a tensor-parallel rank which does not draft.

    followers: what hears of the requests, in this order. looked_up: whether a draft side hears of the step that begins.
    """

    followers: Sequence[Follower] = ()
    looked_up = False

    def propose(
        self, batch: ScheduleBatch, states: States, depths: Sequence[int], wanted: bool
    ) -> list[DraftTree]:
        """A tree for each request.

        batch: the step that begins, as SGLang has it.
        depths: most levels of each. wanted: whether a draft is likely to pay in this step.
        """
        return [EMPTY_TREE] * len(states)

    def launched(self, states: States) -> float:
        """Called when the step's verification was launched; seconds that its drafts were waited for."""
        return 0.0

    def step_took(self, seconds: float) -> None:
        """A step took so long, without what it waited for."""

    def underway(self, states: States, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """The step's tokens are being computed: `TreeWorker.tokens_underway`."""

    def expected(self, states: States, packed: np.ndarray, choices: Choices) -> None:
        """An early exit expects this of the step: `Speculation.expected`."""


class DatastoreSource(Sources):
    """The datastore, and beside it the requests' own references. The datastore hears nothing of a step that needs nothing of it: the next
    entries carry the step's tokens.

    estimate: of acceptance, by what was seen.
    budget: of a tree.
    """

    def __init__(self, feed: DatastoreFeed, fallback: Fallback, estimate: Estimate, budget: Budget) -> None:
        self.feed, self.fallback, self._estimate, self._budget = feed, fallback, estimate, budget
        self.followers = [feed, fallback]
        compile_references(budget)

    def propose(
        self, batch: ScheduleBatch, states: States, depths: Sequence[int], wanted: bool
    ) -> list[DraftTree]:
        if not wanted and self.feed.has_news(states):
            self.feed.step(states, [NO_DRAFT] * len(states))
        trees = self._drafted(states, depths) if wanted else super().propose(batch, states, depths, wanted)
        return with_references(trees, states, self._estimate, self._budget)

    def step_took(self, seconds: float) -> None:
        self.fallback.step_took(seconds)

    def _drafted(self, states: States, depths: Sequence[int]) -> list[DraftTree]:
        return first_trees(self.fallback.parts(states, [EMPTY_TREE] * len(states)))


class DraftSideSource(DatastoreSource):
    """A draft side's speculation cache, and what the method adds to its trees. Each request gets the best tree of both.

    courier: of an accelerator, None for a CPU.
    """

    def __init__(
        self,
        feed: DatastoreFeed,
        fallback: Fallback,
        estimate: Estimate,
        budget: Budget,
        channel: DraftChannel,
        speculation: Speculation,
        courier: Courier | None,
    ) -> None:
        super().__init__(feed, fallback, estimate, budget)
        self.followers = [feed, speculation, fallback]
        self.channel, self.speculation = channel, speculation
        self._courier = courier

    @property
    def looked_up(self) -> bool:  # type: ignore[override]
        return self.speculation.looked_up

    def launched(self, states: States) -> float:
        self.speculation.verification_launched(states)
        return self.speculation.seconds_waited()

    def underway(self, states: States, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        if self._courier is not None:
            flight = self.speculation.launched(states)
            self._courier.send(tokens, counts, functools.partial(self.speculation.outcomes_ahead, flight))

    def expected(self, states: States, packed: np.ndarray, choices: Choices) -> None:
        self.speculation.expected(states, packed, choices)

    def _drafted(self, states: States, depths: Sequence[int]) -> list[DraftTree]:
        found = self.speculation.look_up(states, depths, self.fallback.patience)
        others = self.fallback.parts(states, found)
        return self.united(states, found, others)

    def united(
        self, states: States, found: Sequence[DraftTree], others: Sequence[list[Part]]
    ) -> list[DraftTree]:
        """The best tree for each request of what was found and what the method adds."""
        parts = [[Part(tree), *more] for tree, more in zip(found, others, strict=True)]
        return best_trees(parts, [state.tenant for state in states], self._estimate, self._budget)
