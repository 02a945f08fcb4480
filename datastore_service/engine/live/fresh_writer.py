"""Adds the outputs of closed sessions to the live tier: to a write-ahead log, then to the fresh text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from datastore_service.engine.live.durable_view import DurableView
from datastore_service.engine.live.epochs import Epochs
from datastore_service.engine.live.merge_policy import MOST_FRESH_TOKENS, fresh_capacity
from datastore_service.engine.live.view import LiveView

log = logging.getLogger(__name__)


class Published(NamedTuple):
    """The outputs that this service has published. outputs: how many of this process. last: number of the newest, 0 without one."""

    outputs: int
    last: int


class FreshWriter:
    """Appends each output to the newest fresh text, and begins a new one when it is full.

    limit: tokens of the tier. full: called when a fresh text waits to be sealed.
    published: the outputs of this service. epochs: of their numbers."""

    def __init__(self, view: DurableView, limit: int, full: Callable[[], object]) -> None:
        self._view = view
        self._capacity = fresh_capacity(limit)
        self._full = full
        self.published = Published(0, view.current.last_number)
        self.epochs = Epochs()
        self._floods = _ErrorLog("an output is not published")
        self._append_errors = _ErrorLog("an output cannot be logged, so it is not published")
        self._sync_errors = _ErrorLog("logged text cannot be synced, a power failure may take it")
        self.failures = 0  # outputs that could not be logged, and failed syncs

    def append(self, output: np.ndarray, provenance: np.ndarray) -> bool:
        """Adds an output, int32, which the next query finds. False if it cannot be logged, or if too much waits to be sealed: then it
        is not added. provenance: PROVENANCE [1]; one of this service gets its number."""
        size = len(output) + 1  # with its separator
        with self._view.lock:
            view = self._view.current
            published_here = not provenance["origin"][0]
            if published_here:
                provenance["number"] = self._next_number()
            full = not view.fresh or not view.fresh[0].has_room(size)
            if full and not self._keeps_up(view, size):
                return False
            if not self._log(view.next_log if full else view.fresh[0].log, output, provenance):
                return False
            if full:
                self._view.show(view.begin_fresh(max(self._capacity, size)))
            self._view.current.fresh[0].add(output, provenance)
            if published_here:  # now that it is in the view: who reads the number finds the text
                self.published = Published(self.published.outputs + 1, int(provenance["number"][0]))
        if full:
            self._full()
        return True

    def _keeps_up(self, view: LiveView, size: int) -> bool:
        """Whether a text of that size may join those that wait to be sealed. Callers publish as fast as they like, and each step looks
        through what waits."""
        if len(view.fresh) < 2:  # not sooner, or a flood would be told of again and again
            self._floods.succeeded()
        if len(view.fresh) < 2 or view.fresh_tokens + size <= MOST_FRESH_TOKENS:
            return True
        self._floods.failed(f"{view.fresh_tokens} tokens are not sorted yet")
        self._full()  # the last run may have failed
        return False

    def begin_new(self) -> None:
        """Begins a new fresh text unless the newest is empty, so that all text so far can be sealed."""
        with self._view.lock:
            view = self._view.current
            if view.fresh and len(view.fresh[0]):
                self._view.show(view.begin_fresh(self._capacity))

    def begin_epoch(self, epoch: int) -> None:
        """Has what is published from now on belong to that epoch, if it is a later one."""
        with self._view.lock:
            if epoch > self.epochs.current:
                self.epochs = self.epochs.begin(epoch, self._next_number())

    def sync(self) -> None:
        """Makes what was appended before the call survive a power failure.

        A log that cannot be synced is ended, so that its text goes to the disk as a segment."""
        try:
            with self._view.saving:
                self._view.store.sync()
        except OSError as error:
            self.failures += 1
            self._sync_errors.failed(error)
            if len(self._view.current.fresh) == 1:  # with more, one that could not be sealed waits already
                self.begin_new()
                self._full()
        else:
            self._sync_errors.succeeded()

    def _next_number(self) -> int:
        """Above those of earlier processes, also where their text has left."""
        return max(self.published.last + 1, time.time_ns() // 1000)

    def _log(self, number: int, output: np.ndarray, provenance: np.ndarray) -> bool:
        try:
            self._view.store.append(number, output, provenance)
        except OSError as error:
            self.failures += 1
            self._append_errors.failed(error)
            return False
        self._append_errors.succeeded()
        return True


class _ErrorLog:
    """Logs the first of several failures in a row, and the success that ends them. what: the failure, in words."""

    def __init__(self, what: str) -> None:
        self._what, self._failing = what, False

    def failed(self, error: object) -> None:
        if not self._failing:
            log.error("live tier: %s: %s", self._what, error)
        self._failing = True

    def succeeded(self) -> None:
        if self._failing:
            log.warning("live tier: works again: %s", self._what)
        self._failing = False
