"""The live tier as the engine uses it. The package's docstring says how it works."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from datastore_service.engine.live.compactor import Compactor
from datastore_service.engine.live.durable_view import DurableView
from datastore_service.engine.live.fresh_writer import FreshWriter
from datastore_service.engine.live.merge_policy import fresh_capacity
from datastore_service.engine.live.store import LiveStore, LogStats, NoStore
from datastore_service.engine.live.view import FreshText, LiveView
from datastore_service.engine.segment import Segment
from datastore_service.engine.share import Share, Unshared


class LiveTier:
    """Text of one namespace. Every method may be called from any thread; `publish`, `clear` and `sync` wait for no merge.

    limit: tokens. changed: called with each new view, under a lock that queries do not take. store: None keeps the text
    in memory alone. share: asked for room for outputs; None has room for all. Raises what the store's `recover` raises.
    """

    def __init__(
        self,
        vocab_size: int,
        limit: int,
        changed: Callable[[LiveView], None],
        store: LiveStore | None = None,
        share: Share | None = None,
    ) -> None:
        self._limit, self._share = limit, share or Unshared()
        store = store or NoStore()
        self._view = DurableView(_recovered_view(store, limit), store, changed)
        self._compactor = Compactor(self._view, vocab_size, limit)
        self._writer = FreshWriter(self._view, limit, full=self._compactor.schedule)
        if self.view.fresh or self.view.segments:
            self._compactor.schedule()

    @property
    def view(self) -> LiveView:
        """What queries see now."""
        return self._view.current

    @property
    def merge_failures(self) -> int:
        """Merges that raised; no text is lost."""
        return self._compactor.failures

    @property
    def log_failures(self) -> int:
        """Outputs that could not be logged, and failed syncs."""
        return self._writer.failures

    def log_stats(self) -> LogStats:
        return self._view.store.stats()

    def publish(self, output: np.ndarray) -> bool:
        """Adds the output of a closed session, int32; the next query finds it. False if it cannot be logged: then it is
        not added. Raises NoRoomError if the share has no room for it."""
        if len(output) == 0 or self._limit == 0:
            return True
        with self._share.adding(len(output) + 1, outputs=1):  # with its separator
            return self._writer.append(output)

    def warmup(self, segment: Segment) -> None:
        """Adds a segment; merges and evicts before it returns. Raises OSError if it cannot be stored, and then has not
        added it."""
        with self._compactor.lock:
            stored = self._view.store.keep(segment)
            try:
                self._view.commit((stored,), lambda view: view.add(stored))
            except OSError:
                self._view.withdraw(stored)
                raise
            self._compactor.run_locked()  # before another call adds one more

    def take_out(self, damaged: set[Segment]) -> None:
        """Stops using the segments that are damaged, as far as they are the tier's."""
        self._view.change(lambda view: view.take_out(damaged))

    def clear(self) -> None:
        """Forgets all text. Raises OSError if a restart might still find it."""
        self._view.change(LiveView.clear)
        self._view.save()

    def sync(self) -> None:
        """Makes what was published before the call survive a power failure. The owner of a tier with a store calls it
        about once a second."""
        self._writer.sync()

    def settle(self) -> None:
        """Waits until every merge that is due is done."""
        self._compactor.schedule().result()

    def compact(self) -> None:
        """Merges everything, the fresh text too, into as few segments as the policy permits. In the caller's thread;
        raises what a merge raises, and then nothing is lost."""
        self._writer.begin_new()
        self._compactor.compact()

    def snapshot(self, name: str) -> tuple[Segment, ...]:
        """Keeps what was published before the call under a name, and returns it. Raises FileExistsError if the name is
        taken, OSError if the disk refuses, ValueError without a store."""
        self._writer.begin_new()
        with self._compactor.lock:
            self._compactor.seal_all()
            with self._view.saving:  # what is saved is not removed meanwhile
                segments = self.view.segments
                self._view.store.snapshot(name, segments)
        return segments

    def restore(self, name: str) -> tuple[Segment, ...]:
        """Replaces all text by a snapshot's, which it returns. Raises FileNotFoundError if there is none of that name,
        what the store raises for a damaged one, ValueError without a store. OSError otherwise: the disk refuses, and it
        is not known which of the two texts a restart finds."""
        with self._compactor.lock:
            segments = self._view.store.open_snapshot(name)
            self._view.commit(segments, lambda view: view.clear(segments))
        self._compactor.run()
        return segments

    def close(self) -> None:
        """Syncs and closes the store, once no merge is running; what comes later stays in memory."""
        self.sync()
        with self._compactor.lock:
            self._view.close()


def _recovered_view(store: LiveStore, limit: int) -> LiveView:
    """What an earlier process left. Its logs become fresh texts that take no more documents."""
    recovered = store.recover()
    fresh: tuple[FreshText, ...] = ()
    for number, documents in recovered.logs:
        text = FreshText(number, sum(len(document) + 1 for document in documents))
        for document in documents:
            text.add(document)
        fresh = (text, *fresh)
    view = LiveView(fresh, recovered.segments, recovered.next_log)
    return view.begin_fresh(fresh_capacity(limit)) if fresh else view
