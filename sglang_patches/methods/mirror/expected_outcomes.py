"""The outcomes that an early exit of the target expects (section 3.1, equations 7 and 8)."""

from __future__ import annotations

from collections.abc import Hashable

from prometheus_client import Counter

from sglang_patches.draft_side.draft import Draft
from sglang_patches.methods.mirror.exit_rates import Choice, ExitRates
from sglang_patches.methods.planner import LikeliestOutcomes
from sglang_patches.methods.saguaro.fan_out import RANKS, ranks_at

TOKENS = Counter(
    "specstore_early_exit_tokens",
    "Tokens of the target after rows where its early exit had spoken: its first choice, another one, or none",
    ["choice"],
)
_FIRST, _OTHER, _NONE = map(TOKENS.labels, ("first", "other", "none"))


class ExpectedOutcomes(LikeliestOutcomes):
    """The draft model's own guesses at once, and the early exit's choices at every verified row, as in the paper's figure 1, as soon as
    it has spoken. What it says adds outcomes and ranks all of them anew, by how often such choices came true."""

    def __init__(self) -> None:
        super().__init__()
        self._exit = ExitRates()

    def basis(self, draft: Draft) -> Hashable:
        return super().basis(draft), bool(draft.expected)

    def choices(self, draft: Draft, node: int) -> dict[int, float]:
        expected = {token: self._exit.rate(choice) for token, choice in self._expected(draft, node).items()}
        return super().choices(draft, node) | expected

    def learn_at(self, draft: Draft, node: int, token: int) -> None:
        super().learn_at(draft, node, token)
        expected = self._expected(draft, node)
        for of, choice in expected.items():
            self._exit.learn(choice, of == token)
        if expected:
            came = expected.get(token)
            (_NONE if came is None else _OTHER if came.rank else _FIRST).inc()

    @staticmethod
    def _expected(draft: Draft, node: int) -> dict[int, Choice]:
        """The exit's choices after a verified node, by token."""
        if node not in draft.expected:
            return {}
        ranks, (tokens, chances) = ranks_at(draft, node), draft.expected[node]
        rows = enumerate(zip(tokens.tolist(), chances.tolist(), strict=True))
        return {token: Choice(rank, ranks.get(token, RANKS), chance) for rank, (token, chance) in rows}
