"""The live tier as the engine uses it. The package's docstring says how it works."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from datastore_service.engine.live.compactor import Compactor
from datastore_service.engine.live.durable_view import DurableView
from datastore_service.engine.live.fresh_writer import FreshWriter, Published
from datastore_service.engine.live.merge_policy import fresh_capacity, largest, parts_of
from datastore_service.engine.live.store import Found, LiveStore, LogStats, NoStore
from datastore_service.engine.live.view import FreshText, LiveView
from datastore_service.engine.provenance import Subject, belonging_to, provenance_of
from datastore_service.engine.segment import Segment
from datastore_service.engine.share import Share, Unshared
from datastore_service.protocol.types import Opening

UNNAMED = Opening()  # of text that nobody is known to have written


class LiveTier:
    """Text of one namespace. Every method may be called from any thread; `publish`, `clear` and `sync` wait for no merge.

    limit: tokens. changed: called with each new view, under a lock that queries do not take. store: None keeps the text
    in memory alone. share: asked for room for outputs; None has room for all. max_age: seconds that a document stays at most.
    clock: seconds since 1970. Raises what the store's `recover` raises.
    """

    def __init__(
        self,
        vocab_size: int,
        limit: int,
        changed: Callable[[LiveView], None],
        store: LiveStore | None = None,
        share: Share | None = None,
        max_age: float = math.inf,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._limit, self._share = limit, share or Unshared()
        self._max_age, self._clock = max_age, clock
        store = store or NoStore()
        self._view = DurableView(_recovered_view(store, limit), store, changed)
        self._compactor = Compactor(self._view, vocab_size, limit, max_age, clock)
        self._writer = FreshWriter(self._view, limit, full=self._compactor.schedule)
        if self.view.fresh or self.view.segments or self.view.forgetting:
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

    def publish(self, output: np.ndarray, opening: Opening = UNNAMED) -> bool:
        """Adds the output of a closed session, int32; the next query finds it. False if it cannot be logged: then it is
        not added. opening: the session's. Raises NoRoomError if the share has no room for it."""
        if len(output) == 0 or self._limit == 0:
            return True
        with self._share.adding(len(output) + 1, outputs=1):  # with its separator
            return self._writer.append(output, provenance_of(opening, self._clock()))

    def take(self, document: np.ndarray, provenance: np.ndarray) -> bool:
        """Adds an output of another service, as `publish` adds one of this. One that is held already, or has its greatest age, is not
        added. The rate of the share's outputs does not count it. provenance: PROVENANCE [1]."""
        too_old = provenance["published"][0] < self._clock() - self._max_age
        if self._limit == 0 or too_old or self.view.holds(document, provenance):
            return True
        with self._share.adding(len(document) + 1):
            return self._writer.append(document, provenance)

    @property
    def published(self) -> Published:
        """The outputs of this service. Each that it counts is in the view, unless it has left."""
        return self._writer.published

    def warmup(self, documents: Sequence[np.ndarray]) -> None:
        """Adds documents as segments, of which none is larger than a merge makes, so that room for younger text takes a part of them at a
        time; merges and evicts before it returns. Raises ValueError for an id outside the vocabulary and OSError if they cannot be
        stored, and then has added nothing."""
        segments = [self._compactor.build(part) for part in parts_of(documents, largest(self._limit))]
        with self._compactor.lock:
            stored: list[Segment] = []
            try:
                for segment in segments:
                    whose = provenance_of(UNNAMED, self._clock(), segment.documents)
                    stored.append(self._view.store.keep(replace(segment, provenance=whose)))
                self._view.commit(stored, lambda view: view.add(*stored))
            except Exception:  # whatever kept one of them out, the others leave no files
                for segment in stored:
                    self._view.withdraw(segment)
                raise
            self._compactor.run_locked()  # before another call adds more

    def take_out(self, damaged: set[Segment]) -> None:
        """Stops using the segments that are damaged, as far as they are the tier's."""
        self._view.change(lambda view: view.take_out(damaged))

    def clear(self) -> None:
        """Forgets all text. Raises OSError if a restart might still find it."""
        self._view.change(LiveView.clear)
        self._view.save()

    def forget(self, subjects: Collection[Subject]) -> list[np.ndarray]:
        """Forgets the text of subjects, in snapshots too; returns the documents. When it returns, the text is in no file that
        counts. If it raises or the process ends sooner, the next start goes on with it."""
        with self._compactor.lock:
            self._view.change(lambda view: replace(view, forgetting=view.forgetting | frozenset(subjects)))
            self._view.save()
            self._writer.begin_new()
            return self._compactor.forget()

    def search(self, subjects: Collection[Subject], texts: Sequence[np.ndarray]) -> Found:
        """Looks for text of subjects, and for texts, in what queries see and in all files."""
        wanted = belonging_to(subjects)
        with self._compactor.lock:  # else text could move from a file not yet read to one that was
            view = self.view
            found = self._view.store.search(wanted, texts)
        seen = sum(int(wanted(text.provenance()).sum()) for text in view.fresh)
        seen += sum(int(wanted(segment.provenance).sum()) for segment in view.segments)
        return replace(found, documents=found.documents + seen)

    @property
    def epoch(self) -> int:
        """The present one."""
        return self._writer.epochs.current

    def begin_epoch(self, epoch: int) -> None:
        """Has what is published from now on belong to that epoch, if it is later than the present one."""
        self._writer.begin_epoch(epoch)

    def keep_epochs(self, keep: int) -> list[np.ndarray]:
        """Removes the text of all but the newest epochs; returns the documents. Snapshots stay. Raises OSError and what a merge raises:
        then some may be left, which another call removes. keep: how many epochs, the present one among them."""
        with self._compactor.lock:
            self._writer.begin_new()
            return self._compactor.drop(self._writer.epochs.older_than(keep))

    def expire(self) -> None:
        """Has text leave that has its greatest age, in the background. The owner of the tier calls it about once a second."""
        view, allowed = self.view, self._clock() - self._max_age
        if view.oldest < allowed:
            if view.fresh[:1] and view.fresh[0].oldest < allowed:
                self._writer.begin_new()
            self._compactor.schedule()

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
        text = FreshText(number, sum(len(document) + 1 for document, _ in documents))
        for document, provenance in documents:
            text.add(document, provenance)
        fresh = (text, *fresh)
    view = LiveView(fresh, recovered.segments, recovered.next_log, forgetting=recovered.forgetting)
    return view.begin_fresh(fresh_capacity(limit)) if fresh else view
