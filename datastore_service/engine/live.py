"""The live tier: what closed sessions have written, log-structured.

A closed session's output is appended to the *fresh* text, an index that takes tokens one by one, and is found by the
next query. A fresh text that is full is *sealed*: on a background thread it becomes a segment, and neighbouring
segments of like size are merged into one, so that a token is sorted again only as often as sizes have levels. Readers
see a `LiveView`; every change makes a new one. Nothing is dropped before what replaces it is in the view, so a merge that
fails loses nothing. The oldest segments leave when the tier holds more than its limit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from datastore_service.engine.retrieval import MAX_SEGMENTS
from datastore_service.engine.segment import Segment, build_segment
from datastore_service.engine.session import SEPARATOR, SessionIndex
from datastore_service.engine.types import EMPTY_TOKENS

log = logging.getLogger(__name__)

FRESH_TOKENS = 1 << 16  # of a fresh text, 3.5 MB with its index
_CLASS_RATIO = 4  # between two size classes, and the segments of one class that are merged
_MOST_SEGMENTS = 24

# One for all namespaces of the process: a merge uses a core, and there may be few.
_background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specstore-merge")


@dataclass(frozen=True, slots=True)
class MergePolicy:
    """Which neighbouring segments become one.

    largest: tokens; a segment this large is merged no further, so that eviction drops a part of the tier at a time.
    """

    largest: int

    def choose(self, sizes: Sequence[int]) -> slice | None:
        """sizes: tokens of the segments, oldest first. Returns the run to merge, None if all is well."""
        for size_class in range(_size_class(self.largest)):
            begin = len(sizes)
            while begin and _size_class(sizes[begin - 1]) <= size_class:
                begin -= 1
            run = slice(begin, len(sizes))
            if len(sizes) - begin >= _CLASS_RATIO and sum(sizes[run]) <= self.largest:
                return run
        if len(sizes) > _MOST_SEGMENTS:
            pairs = [older + newer for older, newer in zip(sizes[:-1], sizes[1:], strict=True)]
            least = int(np.argmin(pairs))
            return slice(least, least + 2)
        return None

    def compacted(self, sizes: Sequence[int]) -> slice | None:
        """The oldest run of neighbours, as long as it may be, that fits into one segment; None if none does."""
        for begin in range(len(sizes) - 1):
            end, total = begin, 0
            while end < len(sizes) and total + sizes[end] <= self.largest:
                total += sizes[end]
                end += 1
            if end - begin >= 2:
                return slice(begin, end)
        return None


def _size_class(size: int) -> int:
    """Sizes up to the fresh text's are class 0, up to four times that class 1 and so on."""
    size_class = 0
    while size > FRESH_TOKENS * _CLASS_RATIO**size_class:
        size_class += 1
    return size_class


@dataclass(frozen=True, slots=True)
class LiveView:
    """What a query sees. fresh: newest first. segments: oldest first."""

    fresh: tuple[SessionIndex, ...] = ()
    segments: tuple[Segment, ...] = ()

    @property
    def tokens(self) -> int:
        """Fresh text counts a separator for each document."""
        return sum(map(len, self.fresh)) + sum(map(len, self.segments))

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self.fresh) + sum(segment.nbytes for segment in self.segments)


class LiveTier:
    """Text of one namespace. Every method may be called from any thread; none but `settle` and `warmup` waits for a merge.

    changed: told each new view, under the tier's lock. limit: tokens.
    """

    def __init__(self, vocab_size: int, limit: int, changed: Callable[[LiveView], None]) -> None:
        self._vocab_size = vocab_size
        self._limit = limit
        self._policy = MergePolicy(largest=limit // 4)
        self._changed = changed
        self._lock = threading.Lock()
        self._maintaining = threading.Lock()  # one thread at a time seals and merges
        self._view = LiveView()
        self.failures = 0  # merges that raised

    def publish(self, tokens: np.ndarray) -> None:
        """Adds the output of a closed session, int32; the next query finds it."""
        if len(tokens) == 0 or self._limit == 0:
            return
        document = np.append(tokens, np.int32(SEPARATOR)).astype(np.int32)
        with self._lock:
            full = not self._view.fresh or not self._view.fresh[0].has_room(len(document))
            if full:
                fresh = SessionIndex(max(min(FRESH_TOKENS, self._limit), len(document)))
                self._show((fresh, *self._view.fresh), self._view.segments)
            self._view.fresh[0].append(document)
        if full:
            _background.submit(self._maintain)

    def warmup(self, segment: Segment) -> None:
        """Adds a segment; merges and evicts before it returns."""
        with self._lock:
            self._show(self._view.fresh, (*self._view.segments, segment))
        self._maintain()

    def clear(self) -> None:
        with self._lock:
            self._show((), ())

    def settle(self) -> None:
        """Waits until every merge that is due is done."""
        _background.submit(self._maintain).result()

    def compact(self) -> None:
        """Merges everything, the fresh text too, into as few segments as the policy permits. In the caller's thread;
        raises what a merge raises, and then nothing is lost."""
        with self._lock:
            if self._view.fresh and len(self._view.fresh[0]):
                self._show(
                    (SessionIndex(min(FRESH_TOKENS, self._limit)), *self._view.fresh), self._view.segments
                )
        with self._maintaining:
            while self._seal_oldest() or self._merge(self._policy.compacted):
                pass

    def _show(self, fresh: tuple[SessionIndex, ...], segments: tuple[Segment, ...]) -> None:
        if len(segments) > MAX_SEGMENTS:  # merges have failed for long
            raise RuntimeError(f"live tier: {len(segments)} segments exceed the limit of {MAX_SEGMENTS}")
        self._view = LiveView(fresh, segments)
        self._changed(self._view)

    def _maintain(self) -> None:
        with self._maintaining:
            try:
                while self._merge(self._policy.choose) or self._seal_oldest():
                    pass
            except Exception:  # whatever it is, the text is still in the view
                self.failures += 1
                log.exception("live tier: a merge failed; its text stays as it was")
            self._evict()

    def _seal_oldest(self) -> bool:
        """Turns the oldest full fresh text into a segment; False if there is none."""
        fresh = self._view.fresh
        if len(fresh) < 2:
            return False
        segment = build_segment(_documents(fresh[-1]), self._vocab_size)
        with self._lock:
            if self._view.fresh and self._view.fresh[-1] is fresh[-1]:  # not flushed meanwhile
                self._show(self._view.fresh[:-1], (*self._view.segments, segment))
        return True

    def _merge(self, choose: Callable[[Sequence[int]], slice | None]) -> bool:
        """Merges the run that `choose` names; False if it names none."""
        segments = self._view.segments
        run = choose([len(segment) for segment in segments])
        if run is None:
            return False
        old = segments[run]
        merged = build_segment(
            [segment.document(i) for segment in old for i in range(segment.documents)], self._vocab_size
        )
        with self._lock:
            at = _place(old, self._view.segments)
            if at is not None:
                now = self._view.segments
                self._show(self._view.fresh, (*now[:at], merged, *now[at + len(old) :]))
        return True

    def _evict(self) -> None:
        """Drops the oldest text beyond the limit, the one fresh text that is not full excepted."""
        with self._lock:
            view = self._view
            while view.tokens > self._limit and (view.segments or len(view.fresh) > 1):
                fresh = view.fresh if view.segments else view.fresh[:-1]
                view = LiveView(fresh, view.segments[1:])
            if view is not self._view:
                self._show(view.fresh, view.segments)


def _documents(index: SessionIndex) -> list[np.ndarray]:
    """The texts of a fresh index, each of which a separator ends."""
    ends = np.flatnonzero(index.tokens == SEPARATOR)
    return [part[part != SEPARATOR] for part in np.split(index.tokens, ends + 1)[:-1]] or [EMPTY_TOKENS]


def _place(run: Sequence[Segment], segments: Sequence[Segment]) -> int | None:
    """Where a run of segments still stands, None if any of it was evicted or flushed."""
    for at in range(len(segments) - len(run) + 1):
        if all(ours is theirs for ours, theirs in zip(run, segments[at:], strict=False)):
            return at
    return None
