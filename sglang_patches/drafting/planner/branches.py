"""What may follow a node that was run: not only the draft model's first choice."""

from __future__ import annotations

from sglang_patches.drafting.draft import Candidates
from sglang_patches.drafting.drafter import Grown
from sglang_patches.drafting.rollouts import Rollouts

MOST, LEAST = 3, 0.05  # children of a node; probability of any but the first


class Branches(Rollouts):
    """A tree after every start. A leaf's value is the probability of the path down to it, so the likeliest are run first, wherever they
    are."""

    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        likeliest = zip(
            candidates.tokens[:MOST].tolist(), candidates.probabilities[:MOST].tolist(), strict=True
        )
        return [
            Grown(node, token, chance)
            for rank, (token, chance) in enumerate(likeliest)
            if not rank or chance >= LEAST
        ]
