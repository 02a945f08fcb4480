"""A speculation is drafted after each guessed outcome (SAGUARO section 4, Algorithm 1)."""

from __future__ import annotations

from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import Drafter, Grown, Leaf


class Rollouts(Drafter):
    """Drafts a chain of `lookahead` tokens (K) after every start, the likeliest start first. A chain stops at a token that ends
    the request."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead

    def leaves(self, draft: Draft) -> list[Leaf]:
        return [Leaf(node, value) for node, value, _ in self._frontier(draft)]

    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        return [Grown(node, int(candidates.tokens[0]), float(candidates.probabilities[0]))]

    def _frontier(self, draft: Draft) -> list[tuple[int, float, int]]:
        """Node, value and depth below its start of all that is not run. Goes on from the last round's, unless the starts are new."""
        starts, waiting = draft.frontier
        if starts is not draft.starts:
            waiting = [(start, chance, 0) for start, chance in draft.starts.items()]
        found = []
        while waiting:
            node, value, depth = waiting.pop()
            if depth >= self._lookahead or draft.finishes(node):
                continue
            if node in draft.candidates:
                waiting += [(child, value * p, depth + 1) for child, _, p in draft.trie.children(node)]
            else:
                found.append((node, value, depth))
        draft.frontier = draft.starts, found
        return list(found)
