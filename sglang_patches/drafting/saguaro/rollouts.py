"""A speculation is drafted after each guessed outcome (section 4, Algorithm 1)."""

from __future__ import annotations

from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.drafter import Drafter, Grown, Leaf


class Rollouts(Drafter):
    """Drafts a chain of `lookahead` tokens (K) after every start, the likeliest start first."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead

    def leaves(self, draft: Draft) -> list[Leaf]:
        if draft.verifying is not None and not draft.starts:
            return [Leaf(node, 1.0) for node in draft.missing()]
        return [leaf for start, chance in draft.starts.items() for leaf in self._leaves(draft, start, chance)]

    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        return [Grown(node, int(candidates.tokens[0]), float(candidates.probabilities[0]))]

    def _leaves(self, draft: Draft, start: int, chance: float) -> list[Leaf]:
        found, waiting = [], [(start, chance, 0)]
        while waiting:
            node, value, depth = waiting.pop()
            if depth >= self._lookahead:
                continue
            if node not in draft.candidates:
                found.append(Leaf(node, value))
            waiting += [(child, value * p, depth + 1) for child, _, p in draft.trie.children(node)]
        return found
