"""The way to the draft side and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sglang_patches.exchange.messages import Answer, Message


class DraftChannel(ABC):
    """Never raises. Lost messages are harmless: a session that is not known there is opened again when the draft side says so."""

    @abstractmethod
    def post(self, messages: Sequence[Message]) -> None:
        """Hands over what happened, in order. Never blocks."""

    @abstractmethod
    def collect(self, seconds: float) -> list[Answer]:
        """What has come since the last call; if nothing has, waits for it so long at most. Nothing means that there is nothing to wait
        for any longer: a draft side that is down is not waited for."""

    @abstractmethod
    def close(self) -> None:
        """Ends the draft side; idempotent."""
