"""Who keeps up with the running requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_patches.ledger.outcome import Outcome
    from sglang_patches.ledger.requests import RequestState


class Follower:
    """Hears of requests in this order: each is opened, outcomes of its steps follow, and it is closed. What a follower has no use for
    it passes over. One that fails is behind, never wrong.
    """

    def open(self, states: Iterable[RequestState]) -> None:
        """Requests begin, with their texts as far as their outcome is known."""

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        """Steps of requests have ended so."""

    def taken_back(self, states: Iterable[RequestState]) -> None:
        """The last step of these requests did not happen: SGLang dropped its result."""

    def close(self, states: Iterable[RequestState]) -> None:
        """Requests have ended."""

    def drop(self, states: Iterable[RequestState]) -> None:
        """All requests are forgotten, with what is not told of them yet."""
