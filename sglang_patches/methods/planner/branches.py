"""What may follow a node that was run: not only the draft model's first choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_patches.draft_side.draft import Candidates
from sglang_patches.draft_side.rollouts import Rollouts
from sglang_patches.draft_side.seams import Grown

MOST, LEAST = 3, 0.05  # children of a node; probability of any but the first


class Branches(Rollouts):
    """A tree after every start. A leaf's value is the probability of the path down to it, so the likeliest are run first, wherever they
    are.

    rates_of: how often each of a node's candidates is the target's token.
    """

    def __init__(self, lookahead: int, rates_of: Callable[[Candidates], Sequence[float]]) -> None:
        super().__init__(lookahead)
        self._rates_of = rates_of

    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        likeliest = zip(candidates.tokens[:MOST].tolist(), self._rates_of(candidates), strict=False)
        return [
            Grown(node, token, rate)
            for rank, (token, rate) in enumerate(likeliest)
            if not rank or rate >= LEAST
        ]
