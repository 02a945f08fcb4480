"""Which tokens begin a sequence (section 3.2, draft sequences construction)."""

from __future__ import annotations

from sglang_patches.drafting.double import AllAccepted
from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.predictor import Guess

MOST = 8  # sequences, as in the published code


class Heads(AllAccepted):
    """The draft model's first choice after the end of the verified chain, and once its second token is known the other tokens that
    are likelier than theta = p1 p2, the probability of both.

    most: sequences at most. fixed: a number of sequences instead, the likeliest tokens whatever theta is (table 2's static rows).
    """

    def __init__(self, most: int = MOST, fixed: int | None = None) -> None:
        self._most, self._fixed = most, fixed

    def more(self, draft: Draft, budget: int) -> list[Guess]:
        first = next(iter(draft.starts), None)
        if first is None or first not in draft.candidates:
            return []
        end = draft.trie.parent(first)
        theta = draft.trie.probability(first) * float(draft.candidates[first].probabilities[0])
        tokens, chances = draft.candidates[end]
        likely = zip(tokens.tolist(), chances.tolist(), strict=True)
        if self._fixed is None:
            heads = [(token, chance) for token, chance in likely if chance > theta][: self._most]
        else:
            heads = list(likely)[: self._fixed]
        return [
            Guess(end, token, chance)
            for token, chance in heads
            if draft.trie.child(end, token) is None and token not in draft.sampling.ends
        ]
