"""The outcomes that an early exit of the target expects (section 3.1, equations 7 and 8)."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter

from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.planner import LikeliestOutcomes

TOKENS = Counter(
    "specstore_early_exit_tokens",
    "Tokens of the target after rows where its early exit had spoken: its first choice, another one, or none",
    ["choice"],
)
_FIRST, _OTHER, _NONE = map(TOKENS.labels, ("first", "other", "none"))


class ExpectedOutcomes(LikeliestOutcomes):
    """The early exit's choices at every verified row, as in the paper's figure 1, the likeliest first by how often such choices came
    true. Until it has said them, the draft model runs the verified nodes."""

    def known(self, draft: Draft) -> Mapping[int, Candidates]:
        return draft.expected

    def learn_choice(self, candidates: Candidates, rank: int) -> None:
        super().learn_choice(candidates, rank)
        (_NONE if rank >= len(candidates.tokens) else _OTHER if rank else _FIRST).inc()

    def missing(self, draft: Draft) -> list[int]:
        return [] if draft.expected else draft.missing()
