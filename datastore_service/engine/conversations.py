"""Texts of closed sessions, kept by conversation for its next request."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from datastore_service.engine.provenance import Subject
from datastore_service.engine.session import SessionIndex

Subjects = frozenset[Subject]


class Conversations:
    """Keeps at most `count` texts and `nbytes` bytes, none longer than `seconds`. The oldest leaves first.

    Not thread-safe: the engine calls it under its lock."""

    def __init__(
        self, count: int, nbytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = count, nbytes, seconds
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, SessionIndex, Subjects]] = OrderedDict()
        self.nbytes = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, name: str, index: SessionIndex, subjects: Subjects = frozenset()) -> None:
        """Keeps an index, in place of an earlier one of that name. subjects: that it has text of."""
        self.take(name)
        self._kept[name] = self._clock(), index, subjects
        self.nbytes += index.nbytes
        self.tokens += len(index)
        self._evict()

    def take(self, name: str) -> tuple[SessionIndex, Subjects] | None:
        """Removes and returns an index and whose text it has, None if there is none."""
        self._evict()
        if name not in self._kept:
            return None
        _, index, subjects = self._kept.pop(name)
        self._uncount(index)
        return index, subjects

    def drop_oldest(self) -> None:
        _, (_, index, _) = self._kept.popitem(last=False)
        self._uncount(index)

    def forget(self, subjects: Subjects) -> None:
        """Drops what has text of any of the subjects."""
        for name in [name for name, (_, _, theirs) in self._kept.items() if theirs & subjects]:
            self.take(name)

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = self.tokens = 0

    def _uncount(self, index: SessionIndex) -> None:
        self.nbytes -= index.nbytes
        self.tokens -= len(index)

    def _evict(self) -> None:
        count, nbytes, seconds = self._limits
        oldest_allowed = self._clock() - seconds
        while self._kept and (
            len(self._kept) > count
            or self.nbytes > nbytes
            or next(iter(self._kept.values()))[0] < oldest_allowed
        ):
            self.drop_oldest()
