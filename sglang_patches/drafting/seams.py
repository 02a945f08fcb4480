"""What drafting asks of others: a way to the draft side and back, and a method's fallback, which makes trees where no outcome was
foreseen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting.union import Part
from sglang_patches.exchange.messages import Answer, Message
from sglang_patches.ledger.outcome import Follower

if TYPE_CHECKING:
    from sglang_patches.ledger.requests import RequestState


class DraftChannel(ABC):
    """Never raises. Messages may be lost: a draft side that has not the session of a later one says so, and it is opened again."""

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


class Patience(NamedTuple):
    """How long a step waits for the draft side: until each missing tree has so many nodes, or so many seconds have passed."""

    seconds: float
    nodes: int = 1


NO_PATIENCE = Patience(0.0)


class Fallback(Follower, ABC):
    @abstractmethod
    def parts(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[list[Part]]:
        """What may be verified for each request beside the tree that is found: first what continues its text, if anything does. Within the
        deadline of a step, and never raises. found: the trees that the draft side has prepared, empty for requests that are missed."""

    def patience(self, states: Sequence[RequestState], missed: Sequence[int]) -> Patience:
        """How long a step of these requests waits for the draft side before it falls back. missed: rows without a tree."""
        return NO_PATIENCE

    def step_took(self, seconds: float) -> None:  # noqa: B027 - may be nothing
        """A decode step between which and the next nothing else ran took so long, without what it waited for the draft side."""


class NoFallback(Fallback):
    """A miss is decoded without a draft."""

    def parts(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[list[Part]]:
        return [[] for _ in states]
