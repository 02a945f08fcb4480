"""A target that is a function of the text, and draft models that agree with it as often as one likes."""

from __future__ import annotations

import numpy as np

from tests.support.draft_side import Function

VOCABULARY = 100


def target(text: list[int]) -> int:
    """The target's own next token: any function of the text will do."""
    return (7 * text[-1] + 3 * text[-2] + 1) % VOCABULARY


def model(chance: float, seed: int = 0) -> Function:
    """A draft model that agrees with the target so often."""

    def distributions(texts: list[list[int]]) -> np.ndarray:
        out = np.full((len(texts), VOCABULARY), 0.1 / VOCABULARY, np.float32)
        for row, text in enumerate(texts):
            agrees = np.random.default_rng([seed, *text]).random() < chance
            out[row, target(text) if agrees else (target(text) + 1) % VOCABULARY] += 0.6
            out[row, (target(text) + 2) % VOCABULARY] += 0.3
        return out

    return distributions
