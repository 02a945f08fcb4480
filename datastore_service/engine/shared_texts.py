"""The texts that all sessions of a namespace search: the prior and the live tier."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from datastore_service.engine.batch import source_table
from datastore_service.engine.live.view import LiveView
from datastore_service.engine.retrieval import MAX_SEGMENTS
from datastore_service.engine.segment import Segment


@dataclass(frozen=True, slots=True)
class Texts:
    """What one step searches. table: the texts' addresses (see `source_table`), valid as long as this object lives."""

    prior: tuple[Segment, ...]
    live: LiveView
    table: np.ndarray

    @staticmethod
    def of(prior: tuple[Segment, ...], live: LiveView) -> Texts:
        return Texts(prior, live, source_table(live.fresh, live.segments, prior))


class SharedTexts:
    """Holds the current `Texts`. A change replaces them; a step in progress finishes with those that it began with.

    damaged: segments of the prior that were taken out. vocab_size: of the namespace; no segment may have a larger one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self.current = Texts.of((), LiveView())
        self.damaged = 0

    def set_prior(self, segments: Sequence[Segment]) -> None:
        """Raises ValueError for too many segments and for one of a larger vocabulary."""
        self._check(segments)
        with self._lock:
            self.current = Texts.of(tuple(segments), self.current.live)
            self.damaged = 0

    def clear_prior(self) -> None:
        with self._lock:
            self.current = Texts.of((), self.current.live)

    def take_out(self, damaged: Collection[Segment]) -> None:
        """Removes damaged segments from the prior, and counts them."""
        with self._lock:
            intact = tuple(segment for segment in self.current.prior if segment not in damaged)
            self.damaged += len(self.current.prior) - len(intact)
            self.current = Texts.of(intact, self.current.live)

    def set_live(self, live: LiveView) -> None:
        with self._lock:
            self.current = Texts.of(self.current.prior, live)

    def _check(self, segments: Sequence[Segment]) -> None:
        if len(segments) > MAX_SEGMENTS:
            raise ValueError(f"segments: {len(segments)} exceed the limit of {MAX_SEGMENTS}")
        for segment in segments:
            if segment.vocab_size > self._vocab_size:
                raise ValueError(
                    f"segments: a vocabulary of {segment.vocab_size} exceeds the engine's {self._vocab_size}"
                )
