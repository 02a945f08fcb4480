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
    @abstractmethod
    def open(self, draft: Draft) -> None:
        """A session begins, with the draft's text."""

    @abstractmethod
    def commit(self, draft: Draft, start: int, path: Sequence[int]) -> None:
        """The draft's text has grown from `start` tokens on, by the tokens of these nodes and then others. Nodes that its trie no
        longer has are gone."""

    @abstractmethod
    def close(self, draft: Draft) -> None:
        """Idempotent."""

    @abstractmethod
    def ready(self, draft: Draft) -> bool:
        """Whether rows of the session can be run now. If not, `prefill` makes it so, if there is room."""

    @abstractmethod
    def prefill(self, drafts: Sequence[Draft]) -> bool:
        """Runs a chunk of the first of these texts that is not ready; whether there was anything to run."""

    @abstractmethod
    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        """Runs the rows. None for a row that there was no room for. A node's ancestors were run before, or are run now."""
