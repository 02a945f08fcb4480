"""The interface through which a drafter uses a datastore, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from datastore_service.protocol.types import Entry, Reply


class DatastoreError(Exception):
    """The datastore could not answer: missed deadline, lost connection, refused request."""


class Texts(ABC):
    """The texts of open sessions, which a datastore's user keeps: what a service has lost is sent again from there."""

    @abstractmethod
    def told(self, session: str, known: int) -> Entry | None:
        """The entry that tells all but the first `known` tokens again of those that the session was told with, its opening if none are
        known; None if it is not open."""


class NoTexts(Texts):
    """Nothing can be sent again."""

    def told(self, session: str, known: int) -> Entry | None:
        return None


class Datastore(ABC):
    """Sessions and drafts of one namespace. Calls of one instance come from one thread."""

    @property
    @abstractmethod
    def wants_rejected(self) -> bool:
        """Whether refused tokens of entries are used. It may change when a service reconnects. Tokens that are not used are
        not sent."""

    @abstractmethod
    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        """Applies the entries and drafts for them; one Reply for each Entry, in the same order.

        deadline: seconds that this call may take. Raises DatastoreError (the resilient client never does).
        """

    @abstractmethod
    def post(self, entries: Sequence[Entry]) -> None:
        """Applies entries without waiting (prompts, closings), before any later step. It never blocks on the service and
        never raises DatastoreError: the status of a later Reply shows a lost session."""

    @abstractmethod
    def close(self) -> None:
        """Releases connections and threads. May be called twice."""
