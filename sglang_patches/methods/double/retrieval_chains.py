"""How far the draft side drafts in a round (section 5.1: gamma = ceil(C))."""

from __future__ import annotations

from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.rollouts import Rollouts
from sglang_patches.draft_side.seams import Leaf
from sglang_patches.draft_side.speed_ratio import SpeedRatio


class RetrievalChains(Rollouts):
    """One chain after the guess, of gamma = ceil(C) forwards a round and `lookahead` tokens at most. Each forward gives as many tokens
    as the draft model accepts of a phrase, and one more."""

    def __init__(self, lookahead: int, ratio: SpeedRatio) -> None:
        super().__init__(lookahead)
        self._ratio = ratio

    def leaves(self, draft: Draft) -> list[Leaf]:
        return super().leaves(draft) if draft.forwards < self._ratio.value else []
