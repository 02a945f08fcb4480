"""The interface of a store that keeps a live tier's text beyond the process.

The engine uses no files: `datastore_service.storage` implements the interface for a folder. The text of a tier without a
store is lost with its process. The store gets text before queries see it, and the list of valid segments after: if the
process is killed in between, the store has too much rather than too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from datastore_service.engine.provenance import Selection, Subject
from datastore_service.engine.segment import Segment


@dataclass(frozen=True, slots=True)
class LogStats:
    """The size of a store's logs.

    nbytes: bytes of all logs.
    unsynced: how many of them a power failure would take."""

    nbytes: int = 0
    unsynced: int = 0


Document = tuple[np.ndarray, np.ndarray]  # int32, and its PROVENANCE [1]


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier process left. segments: oldest first. logs: number and documents of each, oldest first.
    next_log: a number above those of all earlier logs. forgetting: subjects whose text has yet to leave."""

    segments: tuple[Segment, ...] = ()
    logs: tuple[tuple[int, list[Document]], ...] = ()
    next_log: int = 1
    forgetting: frozenset[Subject] = frozenset()


@dataclass(frozen=True, slots=True)
class Found:
    """What a search of a store's files has found.

    files, nbytes: that were read.
    documents: of the selected ones, how many are left.
    texts: how many texts were looked for, byte by byte; short ones are not, which occur anywhere.
    found: how many of them are in some file."""

    files: int = 0
    nbytes: int = 0
    documents: int = 0
    texts: int = 0
    found: int = 0


class LiveStore(Protocol):
    """Every method but `stats` may raise OSError. It then has changed all or nothing of what a restart sees.

    Calls of one method do not overlap. `append` may run at the same time as any other method, `keep` as `save`."""

    def recover(self) -> Recovered:
        """Called once, before any other method."""
        ...

    def append(self, number: int, tokens: np.ndarray, provenance: np.ndarray) -> None:
        """Adds a document, int32, with its PROVENANCE [1] to the log of that number; the first document creates the log.
        After return it survives the process, but not yet a power failure."""
        ...

    def sync(self) -> None:
        """Makes what was appended before the call survive a power failure. After a failure it fails for that log until the
        log is no longer needed: pages that the system has dropped cannot be synced again."""
        ...

    def keep(self, segment: Segment) -> Segment:
        """Writes a segment; returns the same text, mapped from the file. A restart finds it once it is saved."""
        ...

    def discard(self, segment: Segment) -> None:
        """Removes a segment of `keep` or `open_snapshot` that will not be saved (again)."""
        ...

    def save(
        self, segments: tuple[Segment, ...], first_log: int, forgetting: frozenset[Subject] = frozenset()
    ) -> None:
        """Makes a restart find these segments and the logs from `first_log` on, and removes all others. It survives a power
        failure. segments: each from `keep`; damaged ones first, then oldest first. forgetting: as of `LiveView`."""
        ...

    def snapshot(self, name: str, segments: tuple[Segment, ...]) -> None:
        """Keeps segments of the last `save` under a name. Raises FileExistsError if the name is taken."""
        ...

    def open_snapshot(self, name: str) -> tuple[Segment, ...]:
        """The segments of a snapshot, verified, as `keep` returns them. Raises FileNotFoundError if there is none."""
        ...

    def thin_snapshots(self, leaving: Selection) -> list[np.ndarray]:
        """Takes documents out of all snapshots; returns them. It survives a power failure."""
        ...

    def search(self, wanted: Selection, texts: Sequence[np.ndarray]) -> Found:
        """Reads all files, whether they count or not, snapshots too. texts: int32 each."""
        ...

    def stats(self) -> LogStats: ...

    def close(self) -> None:
        """Closes all files. No method may be called afterwards."""
        ...


class NoStore:
    """The store of a tier that is kept in memory alone."""

    def recover(self) -> Recovered:
        return Recovered()

    def append(self, number: int, tokens: np.ndarray, provenance: np.ndarray) -> None:
        pass

    def sync(self) -> None:
        pass

    def keep(self, segment: Segment) -> Segment:
        return segment

    def discard(self, segment: Segment) -> None:
        pass

    def save(
        self, segments: tuple[Segment, ...], first_log: int, forgetting: frozenset[Subject] = frozenset()
    ) -> None:
        pass

    def snapshot(self, name: str, segments: tuple[Segment, ...]) -> None:
        raise ValueError("snapshot: the live tier is kept in memory alone")

    def open_snapshot(self, name: str) -> tuple[Segment, ...]:
        raise ValueError("snapshot: the live tier is kept in memory alone")

    def thin_snapshots(self, leaving: Selection) -> list[np.ndarray]:
        return []

    def search(self, wanted: Selection, texts: Sequence[np.ndarray]) -> Found:
        return Found()

    def stats(self) -> LogStats:
        return LogStats()

    def close(self) -> None:
        pass
