"""What the draft side asks of others: a draft model, and a method's predictor, drafter, retriever and choice of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from datastore_service.protocol.tree import DraftTree
from sglang_patches.draft_side.draft import Candidates, Draft


class Row(NamedTuple):
    """One row of a draft forward: the session's text, then its trie's path down to `node`."""

    draft: Draft
    node: int


class DraftModel(ABC):
    """What is not abstract does nothing, as for a model without KV."""

    def commit(self, draft: Draft, start: int, path: Sequence[int]) -> None:  # noqa: B027
        """The draft's text has grown from `start` tokens on, by the tokens of these nodes and then others. Nodes that its trie no
        longer has are gone."""

    def discard(self, draft: Draft, nodes: Sequence[int]) -> None:  # noqa: B027
        """These nodes are no longer in the trie."""

    def close(self, draft: Draft) -> None:  # noqa: B027
        """The session ends. Idempotent."""

    def takes(self, draft: Draft) -> bool:
        """Whether it can run the session's text at all, whatever room there is. Not again once it cannot: a text only grows."""
        return True

    def ready(self, draft: Draft) -> bool:
        """Whether rows of the session can be run now. If not, `prefill` makes it so, if there is room."""
        return True

    def prefill(self, drafts: Sequence[Draft]) -> bool:
        """Runs a chunk of those texts that are not ready; whether there was anything to run, and room for it."""
        return False

    @abstractmethod
    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        """Runs the rows. None for a row that there was no room for. A node's ancestors were run before, or are run now."""


class Guess(NamedTuple):
    """The target's own token after the accepted path that ends at `parent`. probability: that it comes so."""

    parent: int
    token: int
    probability: float


class Prediction(NamedTuple):
    """What is known of a verification's outcome. guesses: the likeliest outcomes. unknown: verified nodes that the draft model should
    run for better guesses, which compete with the drafter's leaves. The value of such a node is the probability that the verification
    ends at it, and 1 where nothing can be guessed without it."""

    guesses: list[Guess]
    unknown: dict[int, float]


class OutcomePredictor(ABC):
    """Predicts the outcomes that a verification may have."""

    @abstractmethod
    def predict(self, draft: Draft, budget: int) -> Prediction:
        """The outcomes of `draft.verifying`, at most `budget` of them, by what is known now. Asked for again when `basis` has changed:
        the guesses then take the place of those before."""

    def basis(self, draft: Draft) -> Hashable:
        """What a prediction rests on: by default, how many of the nodes where the verification may end the draft model has run."""
        return sum(node in draft.candidates for node in draft.ends)

    def learn(self, draft: Draft, path: Sequence[int], tokens: Sequence[int]) -> None:  # noqa: B027 - may be nothing
        """Called with each outcome, before the draft moves on. path: the trie's nodes that carry the first of the tokens."""


class Leaf(NamedTuple):
    """A node to run. value: how likely it is that the target needs what follows it."""

    node: int
    value: float


class Grown(NamedTuple):
    """A node to add."""

    parent: int
    token: int
    probability: float


class Drafter(ABC):
    """Says what the draft model is run on next, and what is drafted then."""

    @abstractmethod
    def leaves(self, draft: Draft) -> list[Leaf]:
        """The session's nodes that are worth running next, in any order; none when everything worthwhile is drafted."""

    @abstractmethod
    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        """What is drafted after a node that was run."""


class Retriever(ABC):
    """Proposes what may follow a node at no cost to the draft model.

    The draft model checks a proposal in the forward that runs the node: a retrieval forward (DOUBLE, section 2.2).
    """

    @abstractmethod
    def phrases(self, rows: Sequence[Row], nodes: int) -> list[DraftTree]:
        """A tree of at most `nodes` nodes for each row, of what may follow it. Never raises."""

    def closed(self, draft: Draft) -> None:  # noqa: B027 - may be nothing
        """The request has ended."""

    def forgotten(self, draft: Draft) -> None:  # noqa: B027 - may be nothing
        """The session begins again with another draft."""


class RowChoice(ABC):
    """Chooses how many rows a draft forward has."""

    @abstractmethod
    def rows(self, values: np.ndarray) -> int:
        """How many of the rows are worth running. values: float64, of each, descending; at least one."""

    def room(self, rows: int, leaves: int, ends: int) -> int:
        """How many nodes may be proposed behind each of `ends` leaves. rows: that a forward may have; leaves: of these are taken."""
        return (rows - leaves) // max(1, ends)

    def took(self, rows: int, seconds: float) -> None:  # noqa: B027 - may be nothing
        """A forward of so many rows took so long."""


class AllRows(RowChoice):
    """Chooses as many rows as a forward may have."""

    def rows(self, values: np.ndarray) -> int:
        return len(values)
