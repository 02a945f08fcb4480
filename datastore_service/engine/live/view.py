"""What a query sees of the live tier: an immutable value. Every change makes a new one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from datastore_service.engine.provenance import PROVENANCE, Subject
from datastore_service.engine.segment import Segment
from datastore_service.engine.session import SEPARATOR, SessionIndex
from datastore_service.protocol.types import EMPTY_TOKENS


class FreshText(SessionIndex):
    """Outputs of closed sessions, a separator after each.

    log: number of the write-ahead log with the same text. oldest: when its oldest document was published, in seconds since 1970; infinite
    without one. Others' documents do not come in the order in which they were published."""

    __slots__ = ("_provenance", "log", "oldest")

    def __init__(self, log: int, capacity: int) -> None:
        super().__init__(capacity)
        self.log = log
        self._provenance = bytearray()  # of all documents
        self.oldest = math.inf

    def add(self, document: np.ndarray, provenance: np.ndarray) -> None:
        """Appends a document and a separator.

        document: int32, without a separator. provenance: PROVENANCE [1]."""
        self._provenance += provenance.tobytes()
        self.oldest = min(self.oldest, float(provenance["published"][0]))
        self.append(np.append(document, np.int32(SEPARATOR)).astype(np.int32))

    def provenance(self) -> np.ndarray:
        """PROVENANCE, of each of `documents`."""
        return np.frombuffer(bytes(self._provenance) or bytes(PROVENANCE.itemsize), PROVENANCE)

    @property
    def nbytes(self) -> int:
        return super().nbytes + len(self._provenance)

    def documents(self) -> list[np.ndarray]:
        """The documents, int32, in the order in which they were added."""
        ends = np.flatnonzero(self.tokens == SEPARATOR)
        return [part[part != SEPARATOR] for part in np.split(self.tokens, ends + 1)[:-1]] or [EMPTY_TOKENS]


@dataclass(frozen=True, slots=True)
class LiveView:
    """The texts of the tier at one moment.

    fresh: newest first; only the newest still takes documents. segments: oldest first. next_log: number of the next
    fresh text's log. damaged: segments that no query sees, because their files have changed; a restart finds and names
    them. forgetting: subjects whose text has yet to leave.

    A method that changes nothing returns the view itself."""

    fresh: tuple[FreshText, ...] = ()
    segments: tuple[Segment, ...] = ()
    next_log: int = 1
    damaged: tuple[Segment, ...] = ()
    forgetting: frozenset[Subject] = frozenset()

    @property
    def tokens(self) -> int:
        """Fresh text counts a separator for each document."""
        return self.fresh_tokens + sum(map(len, self.segments))

    @property
    def fresh_tokens(self) -> int:
        return sum(map(len, self.fresh))

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index in self.fresh) + sum(segment.nbytes for segment in self.segments)

    @property
    def oldest(self) -> float:
        """When its oldest document was published, in seconds since 1970; infinite without one."""
        sealed = [float(s.provenance["published"].min()) for s in self.segments if len(s.provenance)]
        return min([*sealed, *(text.oldest for text in self.fresh)], default=math.inf)

    @property
    def last_number(self) -> int:
        """The number of the newest output that this service has published; 0 without one."""
        return max(
            (int(of["number"][of["origin"] == 0].max(initial=0)) for of, _ in self._texts()), default=0
        )

    def published_here(self, after: int, until: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The outputs of this service with numbers above `after`, up to `until`: text, int32, and PROVENANCE [1]. In their order."""
        for provenance, documents in self._texts():
            chosen = _published_here(provenance, after, until)
            texts = documents() if len(chosen) else ()
            for i in chosen:
                yield texts[i], provenance[i : i + 1]

    def count_published_here(self, after: int, until: int) -> int:
        """How many `published_here` gives."""
        return sum(len(_published_here(provenance, after, until)) for provenance, _ in self._texts())

    def holds(self, document: np.ndarray, provenance: np.ndarray) -> bool:
        """Whether it has the output of that origin and number. One that has the same number and text and was published here is that
        output: the data directory was a copy, and the service has another name since. provenance: PROVENANCE [1]."""
        for of, documents in self._texts():
            (found,) = np.nonzero(of["number"] == provenance["number"])
            if (of["origin"][found] == provenance["origin"]).any():
                return True
            own = found[of["origin"][found] == 0]
            if len(own) and any(np.array_equal(documents()[i], document) for i in own):
                return True
        return False

    def _texts(self) -> Iterator[tuple[np.ndarray, Callable[[], Sequence[np.ndarray]]]]:
        """The provenance of each text's documents, and what makes the documents; oldest text first."""
        for segment in self.segments:
            yield segment.provenance, partial(_documents, segment)
        for text in reversed(self.fresh):
            yield text.provenance(), text.documents

    @property
    def first_log(self) -> int:
        """The view needs no log with a lower number."""
        return self.fresh[-1].log if self.fresh else self.next_log

    def begin_fresh(self, capacity: int) -> LiveView:
        """The view with a new fresh text of `capacity` tokens; the newest one until now is full from then on."""
        fresh = FreshText(self.next_log, capacity)
        return replace(self, fresh=(fresh, *self.fresh), next_log=self.next_log + 1)

    def add(self, *segments: Segment) -> LiveView:
        """The view with more segments, the newest."""
        return replace(self, segments=(*self.segments, *segments))

    def seal(self, text: FreshText, segment: Segment) -> LiveView:
        """The view with `segment` in place of the oldest fresh text. Unchanged if that is no longer `text`."""
        if not self.fresh or self.fresh[-1] is not text:
            return self
        return replace(self, fresh=self.fresh[:-1], segments=(*self.segments, segment))

    def merge(self, run: Sequence[Segment], merged: Segment) -> LiveView:
        """The view with `merged` in place of a run of neighbouring segments. Unchanged if any of them has left."""
        at = _position(run, self.segments)
        if at is None:
            return self
        return replace(self, segments=(*self.segments[:at], merged, *self.segments[at + len(run) :]))

    def remove(self, segment: Segment) -> LiveView:
        """The view without a segment, which may be absent."""
        return replace(self, segments=tuple(other for other in self.segments if other is not segment))

    def take_out(self, damaged: Collection[Segment]) -> LiveView:
        """The view with those of its segments that are damaged set apart."""
        found = tuple(segment for segment in self.segments if segment in damaged)
        if not found:
            return self
        intact = tuple(segment for segment in self.segments if segment not in damaged)
        return replace(self, segments=intact, damaged=(*self.damaged, *found))

    def evict(self, limit: int) -> LiveView:
        """The view without the oldest text beyond `limit` tokens. The newest fresh text stays whatever its size."""
        view = self
        while view.tokens > limit and (view.segments or len(view.fresh) > 1):
            if view.segments:
                view = replace(view, segments=view.segments[1:])
            else:
                view = replace(view, fresh=view.fresh[:-1])
        return view

    def clear(self, segments: tuple[Segment, ...] = ()) -> LiveView:
        """A view with these segments and no other text."""
        return LiveView(segments=segments, next_log=self.next_log, forgetting=self.forgetting)


def _published_here(provenance: np.ndarray, after: int, until: int) -> np.ndarray:
    number = provenance["number"]
    return np.flatnonzero((provenance["origin"] == 0) & (number > after) & (number <= until))


def _documents(segment: Segment) -> list[np.ndarray]:
    return [segment.document(i) for i in range(segment.documents)]


def _position(run: Sequence[Segment], segments: Sequence[Segment]) -> int | None:
    """Index of the first segment of `run` in `segments`, None if the run is no longer there as a whole."""
    for at in range(len(segments) - len(run) + 1):
        if all(ours is theirs for ours, theirs in zip(run, segments[at:], strict=False)):
            return at
    return None
