"""What a live tier asks of whatever keeps its text beyond the process.

The engine knows no files: `datastore_service.storage` implements this for a folder, and a tier without a store lives and
dies with its process. A store is told of text before the tier shows it and of a tier's segments after: killed in between,
it has too much rather than too little.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from datastore_service.engine.segment import Segment


@dataclass(frozen=True, slots=True)
class LogStats:
    """nbytes: of all logs. unsynced: of those, bytes that a power failure would take."""

    nbytes: int = 0
    unsynced: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What an earlier process left. segments: oldest first. logs: the documents of each, int32, oldest log first.
    next_log: a number above those of all logs there ever were."""

    segments: tuple[Segment, ...] = ()
    logs: tuple[tuple[int, list[np.ndarray]], ...] = ()
    next_log: int = 1


class LiveStore(Protocol):
    """Every method but `stats` may raise OSError, and then has changed nothing that a restart would see, or all of it.

    Calls of one method do not overlap; `append` may run beside any other, `keep` beside `save`."""

    def recover(self) -> Recovered:
        """Called once, before anything else."""
        ...

    def append(self, number: int, tokens: np.ndarray) -> None:
        """Adds a document, int32, to the log of that number, which begins with its first document. After return it survives the
        process, though not yet a power failure."""
        ...

    def sync(self) -> None:
        """Makes what was appended before the call survive a power failure. Once that fails for a log it fails until the
        log is no longer needed: what the system has dropped cannot be synced again."""
        ...

    def keep(self, segment: Segment) -> Segment:
        """Writes a segment; returns the same text, read from where it was written. It counts once it is saved."""
        ...

    def discard(self, segment: Segment) -> None:
        """Forgets a segment of `keep` or `open_snapshot` that will not be saved, nor saved again."""
        ...

    def save(self, segments: tuple[Segment, ...], first_log: int) -> None:
        """What a restart shall find: these segments, damaged ones first, then oldest first, each from `keep`, and the logs from `first_log` on.
        Survives a power failure. Removes all others."""
        ...

    def snapshot(self, name: str, segments: tuple[Segment, ...]) -> None:
        """Keeps these segments, from the last `save`, under a name. Raises FileExistsError if it is taken."""
        ...

    def open_snapshot(self, name: str) -> tuple[Segment, ...]:
        """The segments of a snapshot, verified, as `keep` returns them. Raises FileNotFoundError if there is none."""
        ...

    def stats(self) -> LogStats: ...

    def close(self) -> None:
        """Releases what is open; nothing may be called afterwards."""
        ...


class NoStore:
    """Of a tier that is kept in memory alone."""

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
