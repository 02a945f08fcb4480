"""What the draft model is run on next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sglang_patches.drafting.cache import Trie
from sglang_patches.drafting.messages import Growth
from sglang_patches.drafting.predictor import Guess


class Row(NamedTuple):
    """One row of a draft forward: the session's text, then its trie's path down to `node`."""

    session: str
    node: int


class Drafter(ABC):
    """All sessions share one draft forward."""

    @abstractmethod
    def plan(self, tries: Mapping[str, Trie], guesses: Mapping[str, Sequence[Guess]], rows: int) -> list[Row]:
        """At most `rows` rows to run next, best first; none when everything worthwhile is drafted."""

    @abstractmethod
    def take(self, rows: Sequence[Row], distributions: np.ndarray) -> list[Growth]:
        """What the rows' distributions (float32 [rows, vocabulary]) add to the tries."""
