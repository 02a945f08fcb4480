"""The method MIRROR: an early exit of the target says what it expects while it still verifies, and the draft model drafts after that."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from prometheus_client import Counter

from sglang_patches.draft_side.draft import Draft
from sglang_patches.ledger.rates import RateTable
from sglang_patches.methods.planner import LikeliestOutcomes
from sglang_patches.methods.saguaro import (
    BIN_CENTRES,
    MEMORY,
    RANK_CLASSES,
    RANKS,
    estimate_bins,
    rank_classes,
    ranks_at,
)

MOST = 8  # kappa of a small batch
_BY_BATCH = ((8, MOST), (16, 4), (32, 2))


TOKENS = Counter(
    "specstore_early_exit_tokens",
    "Tokens of the target at rows that its early exit read: the exit's first choice (first), another of its choices (other), or none of them (none)",
    ["choice"],
)
_PRIOR = 4.0  # pseudo-observations of each class of choices
_FIRST, _OTHER, _NONE = map(TOKENS.labels, ("first", "other", "none"))


def choices_of(batch: int) -> int:
    """kappa, of a batch of so many requests: 8 up to 8, 4 up to 16, 2 up to 32, 1 above."""
    return next((choices for most, choices in _BY_BATCH if batch <= most), 1)


class ExpectedOutcomes(LikeliestOutcomes):
    """The draft model's own guesses at once, and the early exit's choices at every verified row, as in the paper's figure 1, as soon as
    it has spoken. What it says adds outcomes and ranks all of them anew, by how often such choices came true."""

    def __init__(self) -> None:
        super().__init__()
        # How often an exit's choices come true, by their rank, by the same token's rank among the draft model's choices, and by the exit's
        # probability. That is right of the first choice, it is believed, and the less of one the lower its rank.
        by_rank = np.multiply.outer(0.5 ** np.arange(RANK_CLASSES), BIN_CENTRES)
        self._exit = RateTable(np.repeat(by_rank[:, None], RANK_CLASSES, axis=1), _PRIOR, MEMORY)

    def basis(self, draft: Draft) -> Hashable:
        return super().basis(draft), bool(draft.expected)

    def choices(self, draft: Draft, node: int) -> dict[int, float]:
        rates = super().choices(draft, node)
        if node in draft.expected:
            tokens = draft.expected[node].tokens.tolist()
            rates |= zip(tokens, self._exit.rates(_cells(draft, node)).tolist(), strict=True)
        return rates

    def learn_at(self, draft: Draft, node: int, token: int) -> None:
        super().learn_at(draft, node, token)
        if node not in draft.expected:
            return
        tokens = draft.expected[node].tokens.tolist()
        self._exit.learn(_cells(draft, node), np.array([choice == token for choice in tokens]))
        (_NONE if token not in tokens else _FIRST if token == tokens[0] else _OTHER).inc()


def _cells(draft: Draft, node: int) -> tuple[np.ndarray, ...]:
    """The cells of an exit's choices after a verified node."""
    tokens, chances = draft.expected[node]
    ranks = ranks_at(draft, node)
    of_draft = [ranks.get(token, RANKS) for token in tokens.tolist()]
    return rank_classes(range(len(tokens))), rank_classes(of_draft), estimate_bins(chances.tolist())
