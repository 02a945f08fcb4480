"""The live tier: what closed sessions have written, log-structured.

A closed session's output is appended to the *fresh* text, an index that takes tokens one by one, and is found by the
next query. A fresh text that is full is *sealed*: on a background thread it becomes a segment, and neighbouring
segments of like size are merged into one, so that a token is sorted again only as often as sizes have levels. Readers
see a `LiveView`; every change makes a new one. Nothing is dropped before what replaces it is in the view, so a merge that
fails loses nothing. The oldest segments leave when the tier holds more than its limit.

A tier with a store survives its process. A document is in its fresh text's log before the next query finds it; a segment
is stored before a view has it. What a restart shall find is saved after the view has changed, always as the newest view
has it, so that two changes at a time cannot save the older one last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from datastore_service.engine.live_store import LiveStore, LogStats, NoStore
from datastore_service.engine.retrieval import MAX_SEGMENTS
from datastore_service.engine.segment import Segment, build_segment, damaged
from datastore_service.engine.session import SEPARATOR, SessionIndex
from datastore_service.protocol.types import EMPTY_TOKENS

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


class FreshText(SessionIndex):
    """Outputs of closed sessions, a separator after each. log: number of the log that has the same text."""

    __slots__ = ("log",)

    def __init__(self, log: int, capacity: int) -> None:
        super().__init__(capacity)
        self.log = log


@dataclass(frozen=True, slots=True)
class LiveView:
    """What a query sees. fresh: newest first. segments: oldest first. next_log: of the fresh text that comes next.
    damaged: segments that no query sees, because their files have changed; a restart finds and names them."""

    fresh: tuple[FreshText, ...] = ()
    segments: tuple[Segment, ...] = ()
    next_log: int = 1
    damaged: tuple[Segment, ...] = ()

    @property
    def tokens(self) -> int:
        """Fresh text counts a separator for each document."""
        return sum(map(len, self.fresh)) + sum(map(len, self.segments))

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self.fresh) + sum(segment.nbytes for segment in self.segments)

    @property
    def first_log(self) -> int:
        """Logs with a lower number hold nothing that the view needs."""
        return self.fresh[-1].log if self.fresh else self.next_log

    def begin_fresh(self, capacity: int) -> LiveView:
        """With a new fresh text; what was the newest is full from then on."""
        fresh = FreshText(self.next_log, capacity)
        return replace(self, fresh=(fresh, *self.fresh), next_log=self.next_log + 1)


class _Outage:
    """Says once that something fails and once that it works again."""

    def __init__(self, what: str) -> None:
        self._what, self._lasts = what, False

    def goes_on(self, error: Exception) -> None:
        if not self._lasts:
            log.error("live tier: %s: %s", self._what, error)
        self._lasts = True

    def is_over(self) -> None:
        if self._lasts:
            log.warning("live tier: works again: %s", self._what)
        self._lasts = False


class LiveTier:
    """Text of one namespace. Every method may be called from any thread; `publish`, `clear` and `sync` wait for no merge.

    changed: told each new view, under the tier's lock. limit: tokens. store: None keeps the text in memory alone.
    Raises what the store's `recover` raises.

    Locks are taken in the order maintaining, saving, tier. No file is touched under the tier's, but for the one write
    with which `publish` appends to a log.
    """

    def __init__(
        self,
        vocab_size: int,
        limit: int,
        changed: Callable[[LiveView], None],
        store: LiveStore | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._limit = limit
        self._policy = MergePolicy(largest=limit // 4)
        self._changed = changed
        self._store: LiveStore = store or NoStore()
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # one thread at a time syncs, or saves and removes what is in the way
        self._maintaining = threading.Lock()  # one thread at a time makes segments of other text
        self._unsaved = False  # the last save failed
        self._refusals = _Outage("an output cannot be logged, so it is not published")
        self._delays = _Outage("logged text cannot be synced, a power failure may take it")
        self.failures = 0  # merges that raised
        self.log_failures = 0  # outputs that could not be logged, and failed syncs
        self._show(self._recovered())
        if self._view.fresh or self._view.segments:
            _background.submit(self._maintain)

    def publish(self, tokens: np.ndarray) -> bool:
        """Adds the output of a closed session, int32; the next query finds it. False if it cannot be stored: then it is
        not added."""
        if len(tokens) == 0 or self._limit == 0:
            return True
        document = np.append(tokens, np.int32(SEPARATOR)).astype(np.int32)
        with self._lock:
            view = self._view
            full = not view.fresh or not view.fresh[0].has_room(len(document))
            if not self._logged(view.next_log if full else view.fresh[0].log, tokens):
                return False
            if full:
                self._show(view.begin_fresh(max(self._fresh_tokens, len(document))))
            self._view.fresh[0].append(document)
        if full:
            _background.submit(self._maintain)
        return True

    def warmup(self, segment: Segment) -> None:
        """Adds a segment; merges and evicts before it returns. Raises OSError if it cannot be stored, and then has not
        added it."""
        with self._maintaining:
            kept = self._store.keep(segment)
            try:
                self._put((kept,), lambda view: replace(view, segments=(*view.segments, kept)))
            except OSError:
                self._withdraw(kept)
                raise
            self._tend()  # before another call adds one more

    def clear(self) -> None:
        """Forgets all text. Raises OSError if a restart might still find it."""
        with self._lock:
            self._show(LiveView(next_log=self._view.next_log))
        self._save()

    def sync(self) -> None:
        """Makes what was published before the call survive a power failure; whoever holds a tier with a store calls it
        about once a second. A log that cannot be synced is ended, so that its text goes to the disk as a segment."""
        try:
            with self._saving:
                self._store.sync()
        except OSError as error:
            self.log_failures += 1
            self._delays.goes_on(error)
            if len(self._view.fresh) == 1:  # with more, one that could not be sealed waits already
                self._end_fresh()
                _background.submit(self._maintain)
        else:
            self._delays.is_over()

    def settle(self) -> None:
        """Waits until every merge that is due is done."""
        _background.submit(self._maintain).result()

    def compact(self) -> None:
        """Merges everything, the fresh text too, into as few segments as the policy permits. In the caller's thread;
        raises what a merge raises, and then nothing is lost."""
        self._end_fresh()
        with self._maintaining:
            self._save_again()
            while self._seal_oldest() or self._merge(self._policy.compacted):
                pass

    def snapshot(self, name: str) -> tuple[Segment, ...]:
        """Keeps what was published before the call under a name, and returns it. Raises FileExistsError if the name is
        taken, OSError if the disk refuses, ValueError without a store."""
        self._end_fresh()
        with self._maintaining:
            while self._seal_oldest():
                pass
            self.take_out(damaged(self._view.segments))
            with self._saving:  # what is saved is not removed meanwhile
                segments = self._view.segments
                self._store.snapshot(name, segments)
        return segments

    def restore(self, name: str) -> tuple[Segment, ...]:
        """Replaces all text by a snapshot's, which it returns. Raises FileNotFoundError if there is none of that name,
        what the store raises for a damaged one, ValueError without a store. OSError otherwise: the disk refuses, and
        which of the two texts a restart finds is not known."""
        with self._maintaining:
            segments = self._store.open_snapshot(name)
            self._put(segments, lambda view: LiveView(segments=segments, next_log=view.next_log))
        self._maintain()
        return segments

    def take_out(self, found: set[Segment]) -> None:
        """Ends the use of those of the segments that are the tier's."""
        with self._lock:
            view = self._view
            gone = tuple(segment for segment in view.segments if segment in found)
            if gone:
                left = tuple(segment for segment in view.segments if segment not in found)
                self._show(replace(view, segments=left, damaged=(*view.damaged, *gone)))

    def log_stats(self) -> LogStats:
        return self._store.stats()

    def close(self) -> None:
        """Syncs and lets go of the store, once no merge is running; what comes later stays in memory."""
        self.sync()
        with self._maintaining, self._saving, self._lock:
            self._store.close()
            self._store = NoStore()

    @property
    def _fresh_tokens(self) -> int:
        return min(FRESH_TOKENS, self._limit)

    def _recovered(self) -> LiveView:
        """The view that an earlier process left; its logs become fresh texts that take nothing more."""
        recovered = self._store.recover()
        fresh: tuple[FreshText, ...] = ()
        for number, documents in recovered.logs:
            text = FreshText(number, sum(len(document) + 1 for document in documents))
            for document in documents:
                text.append(np.append(document, np.int32(SEPARATOR)))
            fresh = (text, *fresh)
        view = LiveView(fresh, recovered.segments, recovered.next_log)
        return view.begin_fresh(self._fresh_tokens) if fresh else view

    def _logged(self, number: int, tokens: np.ndarray) -> bool:
        try:
            self._store.append(number, tokens)
        except OSError as error:
            self.log_failures += 1
            self._refusals.goes_on(error)
            return False
        self._refusals.is_over()
        return True

    def _end_fresh(self) -> None:
        """Begins a new fresh text unless the newest is empty, so that all there is can be sealed."""
        with self._lock:
            if self._view.fresh and len(self._view.fresh[0]):
                self._show(self._view.begin_fresh(self._fresh_tokens))

    def _show(self, view: LiveView) -> None:
        if len(view.segments) > MAX_SEGMENTS:  # merges have failed for long
            raise RuntimeError(f"live tier: {len(view.segments)} segments exceed the limit of {MAX_SEGMENTS}")
        self._view = view
        self._changed(view)

    def _put(self, kept: tuple[Segment, ...], place: Callable[[LiveView], LiveView | None]) -> None:
        """Shows and saves a view with stored segments; `place` makes it, or returns None if what the segments were made
        of has gone meanwhile."""
        try:
            with self._lock:
                view = place(self._view)
                if view is not None:
                    self._show(view)
            if view is not None:
                self._save()
        finally:
            self._discard_absent(kept)

    def _withdraw(self, kept: Segment) -> None:
        with self._lock:
            others = tuple(segment for segment in self._view.segments if segment is not kept)
            self._show(replace(self._view, segments=others))
        self._discard_absent((kept,))

    def _discard_absent(self, kept: tuple[Segment, ...]) -> None:
        """Those that a flush took out of the view before they were saved, or that never came into it."""
        for segment in kept:
            if segment not in self._view.segments:
                self._store.discard(segment)

    def _save(self) -> None:
        """A restart shall find what the view has now."""
        with self._saving:
            self._unsaved = True
            view = self._view
            self._store.save((*view.damaged, *view.segments), view.first_log)
            self._unsaved = False

    def _save_again(self) -> None:
        if self._unsaved:
            self._save()

    def _maintain(self) -> None:
        with self._maintaining:
            self._tend()

    def _tend(self) -> None:
        """Seals, merges and evicts what is due. Called by the one thread that maintains."""
        self._attempt(self._tidy)
        self._attempt(self._evict)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # whatever it is, the text is still in the view, and in the files a restart reads
            self.failures += 1
            log.exception("live tier: a merge failed; its text stays as it was")

    def _tidy(self) -> None:
        self._save_again()
        while self._merge(self._policy.choose) or self._seal_oldest():
            pass

    def _seal_oldest(self) -> bool:
        """Turns the oldest full fresh text into a segment; False if there is none."""
        fresh = self._view.fresh
        if len(fresh) < 2:
            return False
        kept = self._store.keep(build_segment(_documents(fresh[-1]), self._vocab_size))

        def place(view: LiveView) -> LiveView | None:
            if not view.fresh or view.fresh[-1] is not fresh[-1]:  # flushed meanwhile
                return None
            return replace(view, fresh=view.fresh[:-1], segments=(*view.segments, kept))

        self._put((kept,), place)
        return True

    def _merge(self, choose: Callable[[Sequence[int]], slice | None]) -> bool:
        """Merges the run that `choose` names, or takes out what is damaged of it; False if it names none."""
        segments = self._view.segments
        run = choose([len(segment) for segment in segments])
        if run is None:
            return False
        old = segments[run]
        if found := damaged(old):  # merged, it would pass for intact
            self.take_out(found)
            return True
        documents = [segment.document(i) for segment in old for i in range(segment.documents)]
        kept = self._store.keep(build_segment(documents, self._vocab_size))

        def place(view: LiveView) -> LiveView | None:
            at = _place(old, view.segments)
            if at is None:
                return None
            return replace(view, segments=(*view.segments[:at], kept, *view.segments[at + len(old) :]))

        self._put((kept,), place)
        return True

    def _evict(self) -> None:
        """Drops the oldest text beyond the limit, the one fresh text that is not full excepted."""
        with self._lock:
            view = self._view
            while view.tokens > self._limit and (view.segments or len(view.fresh) > 1):
                if view.segments:
                    view = replace(view, segments=view.segments[1:])
                else:
                    view = replace(view, fresh=view.fresh[:-1])
            changed = view is not self._view
            if changed:
                self._show(view)
        if changed:
            self._save()


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
