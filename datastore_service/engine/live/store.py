"""The interface of a store that keeps a live tier's text beyond the process.

The engine uses no files: `datastore_service.storage` implements the interface for a folder. The text of a tier without a
store is lost with its process. The store gets text before queries see it, and the list of valid segments after: if the
process is killed in between, the store has too much rather than too little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from datastore_service.engine.segment import Segment


@dataclass(frozen=True, slots=True)
class LogStats:
    """The size of a store's logs.

    nbytes: bytes of all logs.
    unsynced: how many of them a power failure would take."""

    nbytes: int = 0
    unsynced: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier process left. segments: oldest first. logs: (number, documents as int32) of each, oldest first.
    next_log: a number above those of all earlier logs."""

    segments: tuple[Segment, ...] = ()
    logs: tuple[tuple[int, list[np.ndarray]], ...] = ()
    next_log: int = 1


class LiveStore(Protocol):
    """Every method but `stats` may raise OSError. It then has changed all or nothing of what a restart sees.

    Calls of one method do not overlap. `append` may run at the same time as any other method, `keep` as `save`."""

    def recover(self) -> Recovered:
        """Called once, before any other method."""
        ...

    def append(self, number: int, tokens: np.ndarray) -> None:
        """Adds a document, int32, to the log of that number; the first document creates the log. After return it survives
        the process, but not yet a power failure."""
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

    def save(self, segments: tuple[Segment, ...], first_log: int) -> None:
        """Makes a restart find these segments and the logs from `first_log` on, and removes all others. It survives a power
        failure. segments: each from `keep`; damaged ones first, then oldest first."""
        ...

    def snapshot(self, name: str, segments: tuple[Segment, ...]) -> None:
        """Keeps segments of the last `save` under a name. Raises FileExistsError if the name is taken."""
        ...

    def open_snapshot(self, name: str) -> tuple[Segment, ...]:
        """The segments of a snapshot, verified, as `keep` returns them. Raises FileNotFoundError if there is none."""
        ...

    def stats(self) -> LogStats: ...

    def close(self) -> None:
        """Closes all files. No method may be called afterwards."""
        ...


class NoStore:
    """The store of a tier that is kept in memory alone."""

    def recover(self) -> Recovered:
        return Recovered()

    def append(self, number: int, tokens: np.ndarray) -> None:
        pass

    def sync(self) -> None:
        pass

    def keep(self, segment: Segment) -> Segment:
        return segment

    def discard(self, segment: Segment) -> None:
        pass

    def save(self, segments: tuple[Segment, ...], first_log: int) -> None:
        pass

    def snapshot(self, name: str, segments: tuple[Segment, ...]) -> None:
        raise ValueError("snapshot: the live tier is kept in memory alone")

    def open_snapshot(self, name: str) -> tuple[Segment, ...]:
        raise ValueError("snapshot: the live tier is kept in memory alone")

    def stats(self) -> LogStats:
        return LogStats()

    def close(self) -> None:
        pass
