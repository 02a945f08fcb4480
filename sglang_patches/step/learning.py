"""What a server learns from outcomes, and counts of them, while no launch waits for it."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_patches.ledger import verified
from sglang_patches.ledger.outcome import Follower, Outcome
from sglang_patches.ledger.requests import RequestBook
from sglang_patches.step.acceptance import Acceptance


class Learning(Follower):
    """Keeps outcomes until a step has been launched, then counts them and learns which drafts are accepted."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._outcomes: list[Outcome] = []  # not learned from
        self._counted = 0  # of these

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        self._outcomes += outcomes

    def count(self) -> None:
        """Counts what is not counted yet, for the server and for each request's answer."""
        news = self._outcomes[self._counted :]
        self._counted = len(self._outcomes)
        verified.count(news)
        for outcome in news:
            outcome.request.usage.add(outcome)

    def learn(self, running: RequestBook) -> None:
        """Counts, and learns what running requests accept."""
        self.count()
        self._acceptance.learn(outcome for outcome in self._outcomes if outcome.request in running)
        self._outcomes.clear()
        self._counted = 0
