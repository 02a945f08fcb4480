"""DUO (Lv et al., DuoDecoding): several sequences after the verified draft, as many as the draft model is unsure."""

from __future__ import annotations

import math
from collections.abc import Hashable

from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Guess, Leaf, Prediction
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.double import AllAccepted
from sglang_patches.methods.saguaro import Rollouts

MOST = 8  # sequences, as in the published code


class Heads(AllAccepted):
    """The draft model's first choice after the end of the verified chain, and once its second token is known the other tokens that
    are likelier than theta = p1 p2, the probability of both.

    most: sequences at most. fixed: a number of sequences instead, the likeliest tokens whatever theta is (table 2's static rows).
    """

    def __init__(self, most: int = MOST, fixed: int | None = None) -> None:
        self._most, self._fixed = most, fixed

    def basis(self, draft: Draft) -> Hashable:
        """Its first head too, once the draft model has run it."""
        return super().basis(draft), any(start in draft.candidates for start in draft.starts)

    def predict(self, draft: Draft, budget: int) -> Prediction:
        prediction = super().predict(draft, budget)
        if not prediction.guesses:
            return prediction
        (first,) = prediction.guesses
        head = draft.trie.child(first.parent, first.token)
        if head is None or head not in draft.candidates:
            return prediction
        theta = first.probability * float(draft.candidates[head].probabilities[0])
        heads = [first, *self._others(draft, first, theta)]
        return Prediction(heads[: self._fixed or self._most], {})

    def _others(self, draft: Draft, first: Guess, theta: float) -> list[Guess]:
        tokens, chances = draft.candidates[first.parent]
        verified = draft.verified_children(first.parent)
        return [
            Guess(first.parent, token, chance)
            for token, chance in zip(tokens.tolist()[1:], chances.tolist()[1:], strict=True)
            if (self._fixed or chance > theta) and not (token in verified or token in draft.sampling.ends)
        ]


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
