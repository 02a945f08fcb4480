"""Evicts the oldest text, seals fresh texts and merges segments, in the background."""

from __future__ import annotations

import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from datastore_service.engine.live.durable_view import DurableView
from datastore_service.engine.live.merge_policy import MergePolicy, largest
from datastore_service.engine.live.view import FreshText
from datastore_service.engine.provenance import Selection, belonging_to, published_before
from datastore_service.engine.segment import Segment, build_segment, damaged, part_of

log = logging.getLogger(__name__)

# Of the age at which a document leaves: those that are nearly as old leave with it, or a segment would be sorted anew for each.
_NEARLY = 7 / 8

# One thread for all namespaces of the process: a merge uses a core, and there may be few.
_background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specstore-merge")


class Compactor:
    """Replaces texts of a view by segments of the same documents.

    lock: held by the one thread that makes segments of other text; it is taken before the view's locks. limit: tokens
    of the tier, of which a merged segment has at most a quarter. max_age, clock: as of `LiveTier`.
    """

    def __init__(
        self,
        view: DurableView,
        vocab_size: int,
        limit: int,
        max_age: float = math.inf,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._view = view
        self._max_age, self._clock = max_age, clock
        self._vocab_size = vocab_size
        self._limit = limit
        self._policy = MergePolicy(largest(limit))
        self.lock = threading.Lock()
        self._scheduling = threading.Lock()
        self._next: Future[None] | None = None
        self.failures = 0  # merges that raised

    def schedule(self) -> Future[None]:
        """Has the background thread do all that is due. A run that has not begun will do it."""
        with self._scheduling:
            if self._next is None or self._next.running() or self._next.done():
                self._next = _background.submit(self.run)
            return self._next

    def run(self) -> None:
        """Does all that is due in the caller's thread."""
        with self.lock:
            self.run_locked()

    def run_locked(self) -> None:
        """The same for a caller that holds `lock`. What fails is logged and counted; it is due again the next time."""
        self._attempt(self.forget)
        self._attempt(self._expire)
        self._attempt(self._evict)
        self._attempt(self._seal_and_merge)

    def compact(self) -> None:
        """Makes the full fresh texts and the segments as few segments as the policy permits, in the caller's thread. Raises
        what a merge raises, and then nothing is lost."""
        with self.lock:
            self._view.retry_save()
            self.seal_all()
            while self._merge(self._policy.next_full_merge):
                pass

    def seal_all(self) -> None:
        """Seals the fresh texts that are full now, merges and evicts what is due, and takes damaged segments out of the view. Called
        under `lock`. Raises what sealing and merging raise.

        Callers may publish as fast as texts are sealed. What they fill meanwhile is for another run, behind those of other namespaces: this
        one would have no end."""
        self._merge_due()
        for text in reversed(self._view.current.fresh[1:]):
            self._seal(text)
            self._merge_due()
        found = damaged(self._view.current.segments)
        self._view.change(lambda view: view.take_out(found))

    def forget(self) -> list[np.ndarray]:
        """Takes the text of the subjects that are to be forgotten out of the tier and its snapshots; returns the documents. Called
        under `lock`. If it raises, they are still to be forgotten."""
        subjects = self._view.current.forgetting
        if not subjects:
            return []
        leaving = belonging_to(subjects)
        removed = self.drop(leaving)
        if origins := [segment.origin for segment in self._view.current.damaged if segment.origin]:
            name = Path(origins[0].path).name
            raise OSError(errno.EIO, f"{name}: damaged, so whose text it has is not known", origins[0].path)
        removed += self._view.store.thin_snapshots(leaving)
        self._view.change(lambda view: replace(view, forgetting=view.forgetting - subjects))
        self._view.save()
        return removed

    def drop(self, leaving: Selection) -> list[np.ndarray]:
        """Takes documents out of the full fresh texts and the segments; returns them. Called under `lock`. Raises what a merge
        raises."""
        self._view.retry_save()
        self.seal_all()
        removed: list[np.ndarray] = []
        for segment in self._view.current.segments:
            gone = leaving(segment.provenance)
            if gone.any():
                removed += segment.chosen(gone)
                self._thin(segment, ~gone)
        return removed

    def _expire(self) -> None:
        now = self._clock()
        if self._view.current.oldest < now - self._max_age:
            self.drop(published_before(now - _NEARLY * self._max_age))

    def _thin(self, segment: Segment, kept: np.ndarray) -> None:
        """Puts a segment with some of the documents in the place of one with all."""
        if kept.any():
            stored = self._view.store.keep(part_of(segment, kept))
            self._view.commit((stored,), lambda view: view.merge((segment,), stored))
        else:
            self._view.change(lambda view: view.remove(segment))
            self._view.save()

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:  # whatever it is, the text is still in the view, and in the files a restart reads
            self.failures += 1
            log.exception("live tier: a merge failed; its text stays as it was")

    def _seal_and_merge(self) -> None:
        self._view.retry_save()
        self.seal_all()

    def _seal(self, text: FreshText) -> None:
        """Turns the oldest fresh text, which is full, into a segment. Does nothing if it is `text` no more."""
        if self._view.current.fresh[-1:] == (text,):
            stored = self._keep(text.documents(), text.provenance())
            self._view.commit((stored,), lambda view: view.seal(text, stored))

    def _merge_due(self) -> None:
        self._evict()  # what leaves need not be merged
        while self._merge(self._policy.next_merge):
            self._evict()

    def build(self, documents: Iterable[np.ndarray]) -> Segment:
        """A segment of documents. Raises ValueError for an id outside the vocabulary."""
        return build_segment(documents, self._vocab_size)

    def _keep(self, documents: Iterable[np.ndarray], provenance: np.ndarray) -> Segment:
        return self._view.store.keep(replace(self.build(documents), provenance=provenance))

    def _merge(self, choose: Callable[[Sequence[int]], slice | None]) -> bool:
        """Merges the run that `choose` returns, or takes its damaged segments out; False if `choose` returns None."""
        segments = self._view.current.segments
        chosen = choose([len(segment) for segment in segments])
        if chosen is None:
            return False
        run = segments[chosen]
        if found := damaged(run):  # merged, it would pass for intact
            self._view.change(lambda view: view.take_out(found))
            return True
        documents = [segment.document(i) for segment in run for i in range(segment.documents)]
        stored = self._keep(documents, np.concatenate([segment.provenance for segment in run]))
        self._view.commit((stored,), lambda view: view.merge(run, stored))
        return True

    def _evict(self) -> None:
        if self._view.change(lambda view: view.evict(self._limit)):
            self._view.save()
