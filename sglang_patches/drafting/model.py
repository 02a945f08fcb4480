"""A draft model and its KV, as the draft side uses them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from sglang_patches.drafting.draft import Candidates, Draft


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
