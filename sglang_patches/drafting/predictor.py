"""Predicts the outcomes that a verification may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from sglang_patches.drafting.cache import Trie


class Guess(NamedTuple):
    """The target's own token after the accepted path that ends at `parent`. probability: that it comes so."""

    parent: int
    token: int
    probability: float


class OutcomePredictor(ABC):
    @abstractmethod
    def guesses(
        self, trie: Trie, verifying: np.ndarray, distributions: np.ndarray, budget: int
    ) -> list[Guess]:
        """The likeliest outcomes, at most `budget`.

        verifying: int64 [nodes], the trie's nodes that are being verified. distributions: float32 [1 + nodes, vocabulary], the
        drafter's own after the root and after each of them.
        """
