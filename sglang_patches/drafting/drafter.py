"""What the draft model is run on next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from sglang_patches.drafting.draft import Candidates, Draft


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
    @abstractmethod
    def leaves(self, draft: Draft) -> list[Leaf]:
        """The session's nodes that are worth running next, in any order; none when everything worthwhile is drafted."""

    @abstractmethod
    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        """What is drafted after a node that was run."""
