"""The texts that all sessions of a namespace search, the prior and the live tier, and those that a session may choose beside them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from datastore_service.engine.batch import source_table
from datastore_service.engine.groups import Groups
from datastore_service.engine.live.view import LiveView
from datastore_service.engine.retrieval import MAX_SEGMENTS
from datastore_service.engine.segment import Segment
from datastore_service.engine.session import SessionIndex
from datastore_service.engine.workspaces import Workspaces
from datastore_service.protocol.types import Opening

log = logging.getLogger(__name__)

MOST_CHOICES = 64  # whose texts are kept until the next change: clients choose, and rollouts have many groups


class Choice(NamedTuple):
    """What a session searches beside the texts that all sessions search, by name."""

    priors: frozenset[str] = frozenset()
    workspace: str = ""
    group: str = ""


NO_CHOICE = Choice()


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """What one step searches. fresh: of the sessions' workspace and group. table: the texts' addresses (see `source_table`), valid as
    long as this object lives."""

    prior: tuple[Segment, ...]
    live: LiveView
    fresh: tuple[SessionIndex, ...]
    table: np.ndarray

    @staticmethod
    def of(prior: tuple[Segment, ...], live: LiveView, fresh: tuple[SessionIndex, ...] = ()) -> Texts:
        table = source_table((*fresh, *live.fresh), live.segments, prior)
        return Texts(prior, live, fresh, table)


class SharedTexts:
    """Holds the current `Texts`. A change replaces them; a step in progress finishes with those that it began with.

    named: the priors that sessions may choose, by name. workspaces, groups: of the sessions. damaged: segments of all priors that were taken out. unknown: names of
    priors that sessions have given and that there are not. vocab_size: of the namespace; no segment may have a larger one."""

    def __init__(self, vocab_size: int, workspace_tokens: int = 0) -> None:
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self.current = Texts.of((), LiveView())
        self.named: dict[str, tuple[Segment, ...]] = {}
        self._chosen: dict[Choice, Texts] = {}  # of the current ones, by what is added
        self.workspaces = Workspaces(workspace_tokens, self._forget_chosen)
        self.groups = Groups(self._forget_chosen)
        self.damaged = self.unknown = 0
        self._reported: set[str] = set()

    @property
    def priors(self) -> tuple[Segment, ...]:
        """The segments of all priors."""
        return (*self.current.prior, *chain.from_iterable(self.named.values()))

    def chosen(self, choice: Choice) -> Texts:
        """The texts that a session of this choice searches. A prior that there is not is left out."""
        workspace = choice.workspace if choice.workspace in self.workspaces else ""
        group = choice.group if choice.group in self.groups else ""
        known = Choice(choice.priors.intersection(self.named), workspace, group)
        if known == NO_CHOICE:
            return self.current
        return self._chosen.get(known) or self._choose(known)

    def note_opening(self, opening: Opening) -> None:
        """Counts the names of priors that a session gives and that there are not. The log has the first, and the first workspace of an
        engine that keeps none."""
        unknown = [name for name in opening.priors if name not in self.named]
        with self._lock:
            self.unknown += len(unknown)
        if unknown:
            self._report("a session names a prior that it may not read", prior=unknown[0])
        if opening.workspace and not self.workspaces.limit:
            self._report("a session names a workspace, and no text of it is kept (--workspace-tokens)")

    def _report(self, what: str, **details: str) -> None:
        """Clients choose: one line of a kind is enough."""
        if what not in self._reported:
            self._reported.add(what)
            log.warning("%s; no other is told", what, extra=details)

    def set_prior(
        self, segments: Sequence[Segment], named: Mapping[str, Sequence[Segment]] | None = None
    ) -> None:
        """Raises ValueError for too many segments and for one of a larger vocabulary. named: the priors that sessions may choose."""
        kept = {name: tuple(of_prior) for name, of_prior in (named or {}).items()}
        self._check([*segments, *chain.from_iterable(kept.values())])
        with self._lock:
            self.named = kept
            self._replace(tuple(segments), self.current.live)
            self.damaged = 0

    def clear_prior(self) -> None:
        with self._lock:
            self.named = {}
            self._replace((), self.current.live)

    def take_out(self, damaged: Collection[Segment]) -> None:
        """Removes damaged segments from the priors, and counts them."""
        with self._lock:
            before = len(self.priors)
            self.named = {name: _without(damaged, segments) for name, segments in self.named.items()}
            self._replace(_without(damaged, self.current.prior), self.current.live)
            self.damaged += before - len(self.priors)

    def set_live(self, live: LiveView) -> None:
        with self._lock:
            self._replace(self.current.prior, live)

    def _replace(self, prior: tuple[Segment, ...], live: LiveView) -> None:
        """Called under the lock."""
        self.current, self._chosen = Texts.of(prior, live), {}

    def _forget_chosen(self) -> None:
        """A workspace or a group has changed."""
        with self._lock:
            self._chosen = {}

    def _choose(self, choice: Choice) -> Texts:
        with self._lock:
            if len(self._chosen) >= MOST_CHOICES:
                self._chosen = {}
            further = chain.from_iterable(self.named.get(name, ()) for name in sorted(choice.priors))
            fresh = (*self.groups.texts(choice.group), *self.workspaces.texts(choice.workspace))
            texts = Texts.of((*self.current.prior, *further), self.current.live, fresh)
            self._chosen[choice] = texts
            return texts

    def _check(self, segments: Sequence[Segment]) -> None:
        if len(segments) > MAX_SEGMENTS:
            raise ValueError(f"segments: {len(segments)} exceed the limit of {MAX_SEGMENTS}")
        for segment in segments:
            if segment.vocab_size > self.vocab_size:
                raise ValueError(
                    f"segments: a vocabulary of {segment.vocab_size} exceeds the engine's {self.vocab_size}"
                )


def _without(damaged: Collection[Segment], segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    return tuple(segment for segment in segments if segment not in damaged)
