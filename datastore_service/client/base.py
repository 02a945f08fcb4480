"""The one interface through which a drafter reaches a datastore, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from datastore_service.protocol.types import Entry, Reply


class DatastoreError(Exception):
    """The datastore could not answer: missed deadline, lost connection, refused request."""


class Datastore(ABC):
    """Sessions and drafts of one namespace. Calls of one instance come from one thread."""

    @property
    @abstractmethod
    def wants_rejected(self) -> bool:
        """Whether entries' refused tokens are of any use; may change when a service comes back. Those that are not do not
        travel."""

    @abstractmethod
    def step(self, entries: Sequence[Entry], deadline: float) -> list[Reply]:
        """Applies the entries and drafts for them, one Reply an Entry in the same order.

        deadline: seconds this call may take. Raises DatastoreError (the resilient client never does).
        """

    @abstractmethod
    def post(self, entries: Sequence[Entry]) -> None:
        """Applies entries without waiting (prompts, closings). Ordered before any later step. Never blocks on the
        service and never raises DatastoreError: a session that was lost shows in a later Reply's status."""

    @abstractmethod
    def close(self) -> None:
        """Gives back connections and threads; idempotent."""
