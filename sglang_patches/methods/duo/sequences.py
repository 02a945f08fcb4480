"""How long the sequences are (section 3.1, hardware-aware drafting budget)."""

from __future__ import annotations

import math

from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.rollouts import Rollouts
from sglang_patches.draft_side.seams import Leaf
from sglang_patches.draft_side.speed_ratio import SpeedRatio


class Sequences(Rollouts):
    """k sequences of gamma / k tokens, their heads among them, with gamma = C. The published code runs them one after the other; here
    they are rows of one forward, so gamma / k forwards draft them all.

    longest: gamma until C is known, and at most.
    """

    def __init__(self, longest: int, ratio: SpeedRatio) -> None:
        super().__init__(longest)
        self._longest, self._ratio = longest, ratio

    def leaves(self, draft: Draft) -> list[Leaf]:
        gamma = min(
            float(self._longest), max(2.0, self._ratio.value)
        )  # two tokens decide how many sequences there are
        share = math.ceil(gamma / max(1, len(draft.starts)))
        return [Leaf(node, value) for node, value, depth in self._frontier(draft) if depth + 1 < share]
