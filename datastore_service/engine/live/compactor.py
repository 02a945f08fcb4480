"""Seals fresh texts, merges segments and evicts the oldest text, in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from datastore_service.engine.live.durable_view import DurableView
from datastore_service.engine.live.merge_policy import MergePolicy
from datastore_service.engine.segment import build_segment, damaged

log = logging.getLogger(__name__)

# One thread for all namespaces of the process: a merge uses a core, and there may be few.
_background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specstore-merge")


class Compactor:
    """Replaces texts of a view by segments of the same documents.

    lock: held by the one thread that makes segments of other text; it is taken before the view's locks. limit: tokens
    of the tier, of which a merged segment has at most a quarter.
    """

    def __init__(self, view: DurableView, vocab_size: int, limit: int) -> None:
        self._view = view
        self._vocab_size = vocab_size
        self._limit = limit
        self._policy = MergePolicy(largest=limit // 4)
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
        self._attempt(self._seal_and_merge)
        self._attempt(self._evict)

    def compact(self) -> None:
        """Makes the full fresh texts and the segments as few segments as the policy permits, in the caller's thread. Raises
        what a merge raises, and then nothing is lost."""
        with self.lock:
            self._view.retry_save()
            while self._seal_oldest() or self._merge(self._policy.next_full_merge):
                pass

    def seal_all(self) -> None:
        """Seals every full fresh text and takes damaged segments out of the view. Called under `lock`. Raises what sealing
        raises."""
        while self._seal_oldest():
            pass
        found = damaged(self._view.current.segments)
        self._view.change(lambda view: view.take_out(found))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # whatever it is, the text is still in the view, and in the files a restart reads
            self.failures += 1
            log.exception("live tier: a merge failed; its text stays as it was")

    def _seal_and_merge(self) -> None:
        self._view.retry_save()
        while self._merge(self._policy.next_merge) or self._seal_oldest():
            pass

    def _seal_oldest(self) -> bool:
        """Turns the oldest full fresh text into a segment; False if there is none."""
        fresh = self._view.current.fresh
        if len(fresh) < 2:
            return False
        stored = self._view.store.keep(build_segment(fresh[-1].documents(), self._vocab_size))
        self._view.commit((stored,), lambda view: view.seal(fresh[-1], stored))
        return True

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
        stored = self._view.store.keep(build_segment(documents, self._vocab_size))
        self._view.commit((stored,), lambda view: view.merge(run, stored))
        return True

    def _evict(self) -> None:
        if self._view.change(lambda view: view.evict(self._limit)):
            self._view.save()
