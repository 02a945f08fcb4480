"""Makes the trees of requests whose outcome was not predicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from datastore_service.protocol.tree import DraftTree

if TYPE_CHECKING:
    from sglang_patches.drafting.requests import RequestState


class Fallback(ABC):
    @abstractmethod
    def trees(self, states: Sequence[RequestState], misses: Sequence[bool]) -> list[DraftTree]:
        """A tree for each request, empty where it is not missed. Within the deadline of a step, and never raises."""

    def patience(self, batch: int, misses: int) -> float:
        """Seconds that a step with so many misses waits for the draft side before it falls back."""
        return 0.0
