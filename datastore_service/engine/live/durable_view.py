"""The live tier's current view: shown to queries, and saved so that a restart finds it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from datastore_service.engine.live.store import LiveStore, NoStore
from datastore_service.engine.live.view import LiveView
from datastore_service.engine.retrieval import MAX_SEGMENTS
from datastore_service.engine.segment import Segment

Change = Callable[[LiveView], LiveView]


class DurableView:
    """Holds the current view and keeps the store in step with it.

    A change is shown first and saved afterwards. `save` always writes the newest view, so that of two changes at a time
    the older one cannot be saved last.

    Two locks, taken in this order: `saving`, held by the one thread that saves or syncs; `lock`, which guards the view.
    No file is touched under `lock`, but for the one write that appends an output to its log.

    changed: called with each new view, under `lock`.
    """

    def __init__(self, view: LiveView, store: LiveStore, changed: Callable[[LiveView], None]) -> None:
        self.store = store
        self.saving = threading.Lock()
        self.lock = threading.Lock()
        self._changed = changed
        self._save_pending = False
        self.show(view)

    @property
    def current(self) -> LiveView:
        return self._view

    def show(self, view: LiveView) -> None:
        """Makes `view` the current one. Called under `lock`."""
        if len(view.segments) > MAX_SEGMENTS:  # merges have failed for a long time
            raise RuntimeError(f"live tier: {len(view.segments)} segments exceed the limit of {MAX_SEGMENTS}")
        self._view = view
        self._changed(view)

    def change(self, change: Change) -> bool:
        """Shows what `change` makes of the current view; False if it returned the view itself."""
        with self.lock:
            view = change(self._view)
            if view is self._view:
                return False
            self.show(view)
        return True

    def commit(self, stored: Sequence[Segment], change: Change) -> None:
        """Shows and saves a view with segments that are in the store. A segment that `change` does not use, because the
        text that it was made of has left meanwhile, is discarded. Raises OSError if the view cannot be saved."""
        try:
            if self.change(change):
                self.save()
        finally:
            self._discard_unused(stored)

    def withdraw(self, stored: Segment) -> None:
        """Removes a segment whose `commit` has failed."""
        self.change(lambda view: view.remove(stored))
        self._discard_unused((stored,))

    def save(self) -> None:
        """Makes a restart find the current view. Raises OSError."""
        with self.saving:
            self._save_pending = True
            view = self._view
            self.store.save((*view.damaged, *view.segments), view.first_log, view.forgetting)
            self._save_pending = False

    def retry_save(self) -> None:
        """Saves if the last save has failed. Raises OSError."""
        if self._save_pending:
            self.save()

    def close(self) -> None:
        """Closes the store; what comes later stays in memory."""
        with self.saving, self.lock:
            self.store.close()
            self.store = NoStore()

    def _discard_unused(self, stored: Sequence[Segment]) -> None:
        """Discards those that never came into the view or that a flush took out before they were saved."""
        for segment in stored:
            if segment not in self._view.segments:
                self.store.discard(segment)
