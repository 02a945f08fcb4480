"""The engine of one namespace: what it has learned, and the calls that a service or a client makes.

Its parts, to be read in this order:

- `protocol.types`: entries and replies, what goes in and out;
- `open_sessions`: running requests and the text of each (`session`: one text and its n-gram index);
- `shared_texts`: the prior and the live tier, which all sessions search (`segment`, `live`), and what a session chooses beside them:
  further priors, a workspace (`workspaces`), what is being written for the same prompt (`groups`);
- `step`: a batch of entries, from locked sessions to replies (`kernel_call`, `batch`: the compiled part);
- `retrieval` finds occurrences of the context, `fusion` makes the tree.

Readers and writers. What a step searches is one immutable value, `shared_texts.Texts`; a writer builds its segment first and
then replaces that value. Locks are taken in this order: sessions, the live tier's, those of the session table, of the groups and of
the shared texts. The latter three are held for microseconds, and no kernel runs under them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from datastore_service.engine.checking import check_entries, joined_tokens, refusal_of
from datastore_service.engine.fusion import FusionWeights
from datastore_service.engine.kernel_call import KernelCallPool
from datastore_service.engine.limits import Limits
from datastore_service.engine.live.fresh_writer import Published
from datastore_service.engine.live.store import Found, LiveStore
from datastore_service.engine.live.tier import LiveTier
from datastore_service.engine.live.view import LiveView
from datastore_service.engine.open_sessions import OpenSessions, Usage
from datastore_service.engine.provenance import Subject
from datastore_service.engine.segment import Segment
from datastore_service.engine.session import SessionIndex
from datastore_service.engine.share import Share, Unshared
from datastore_service.engine.shared_texts import SharedTexts
from datastore_service.engine.stats import EngineStats, SessionInfo, TierStats
from datastore_service.engine.step import StepRunner
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import EMPTY_TOKENS, MAX_VOCAB, Entry, Reply, step_without_refused

log = logging.getLogger(__name__)


class Engine:
    """Sessions, live tier and prior of one namespace. Every method may be called from any thread."""

    def __init__(
        self,
        vocab_size: int,
        prior: Sequence[Segment] = (),
        weights: FusionWeights | None = None,
        limits: Limits | None = None,
        store: LiveStore | None = None,
        share: Share | None = None,
        named_priors: Mapping[str, Sequence[Segment]] | None = None,
    ) -> None:
        """Recovers the live tier from the store, takes the prior and loads the kernels. Raises ValueError naming field and limit, and
        what the store raises for text that it cannot read.

        vocab_size: ids are in [0, vocab_size), at most 2^31.
        store: keeps the live tier beyond the process; None keeps it in memory alone.
        share: asked for room beside the limits; None has room for all.
        named_priors: further ones, which a session reads if its opening names them."""
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size: {vocab_size} is outside 1..{MAX_VOCAB}")
        self.vocab_size = vocab_size
        self.limits = limits or Limits()
        self._weights = (weights or FusionWeights()).packed()
        self._share = share or Unshared()
        self._texts = SharedTexts(vocab_size, self.limits.workspace_tokens)
        self._sessions = OpenSessions(self.limits, self._share, self._texts.groups)
        self._live = LiveTier(
            vocab_size,
            self.limits.live_tokens,
            self._texts.set_live,
            store,
            self._share,
            self.limits.live_seconds,
        )
        self._calls = KernelCallPool()
        self._runner = StepRunner(
            self._sessions, self._texts, self._calls, self._weights, self.limits.refusals, self._live.publish
        )
        self._has_refused = False
        self.set_prior(prior, named_priors)
        self._load_kernels()

    def step(self, entries: Sequence[Entry]) -> list[Reply]:
        """Applies the entries in order, drafts for those with a budget and answers their queries, of which nothing is kept
        or counted. One Reply for each Entry, in the same order.

        A Reply's tree is empty before the session has a token and if nothing matches. Its probabilities estimate how likely
        the target accepts the path up to a node. So their sum over the k likeliest nodes estimates the tokens that a draft
        of k nodes adds to the step.

        An entry that breaks a limit is refused by itself (see `Reply.refusal`). Raises ValueError, before anything is applied, if
        the step has more queries than a step may have."""
        if not entries:
            return []
        epochs = [entry.opening.epoch for entry in entries if entry.opening is not None]
        if epochs and max(epochs) > self.epoch:
            self._live.begin_epoch(max(epochs))
        try:
            queries = check_entries(entries, self.vocab_size)
            tokens = joined_tokens(entries, queries, self.vocab_size)
        except ValueError as error:
            return self._step_without_refused(entries, error)
        if len({entry.session for entry in entries}) == len(entries):
            return self._runner.run(entries, queries, tokens)
        replies: list[Reply] = []
        for distinct in _split_at_repeats(entries):
            tokens = joined_tokens(distinct, queries, self.vocab_size)
            replies += self._runner.run(distinct, queries, tokens)
        return replies

    def _step_without_refused(self, entries: Sequence[Entry], error: ValueError) -> list[Reply]:
        """Refuses the entries that break a limit by themselves, and steps the others. Raises `error` if no entry alone breaks one.

        error: that of the whole step."""
        kept = [refusal_of(entry, self.vocab_size) or entry for entry in entries]
        if all(isinstance(entry, Entry) for entry in kept):
            raise error
        if not self._has_refused:
            log.warning("an entry is refused, and no other of this engine will be told: %s", error)
        self._has_refused = True
        return step_without_refused(kept, self.step)

    # Sessions

    def sessions(self) -> list[SessionInfo]:
        """The open sessions, oldest first."""
        return self._sessions.infos()

    def has_session(self, name: str) -> bool:
        """Whether a session of that name is open."""
        return bool(self.open_of({name}))

    def open_of(self, names: set[str]) -> set[str]:
        """Those of the names of which a session is open."""
        return self._sessions.open_of(names)

    # The prior and the live tier

    def set_prior(
        self, segments: Sequence[Segment], named: Mapping[str, Sequence[Segment]] | None = None
    ) -> None:
        """Replaces the prior, and those that sessions may name. Steps in progress finish with those that they began with. Raises
        ValueError for too many segments in all and for one of a larger vocabulary."""
        self._texts.set_prior(segments, named)

    def segments(self) -> tuple[Segment, ...]:
        """The segments of the priors and of the live tier that steps may search now."""
        return self._texts.priors + self._texts.current.live.segments

    def take_out(self, damaged: set[Segment]) -> None:
        """Stops using the segments that are damaged, as far as they are the engine's; the stats count them. Steps in
        progress finish with what they began with."""
        self._texts.take_out(damaged)
        self._live.take_out(damaged)

    def warmup(self, documents: Iterable[np.ndarray]) -> None:
        """Adds documents to the live tier as segments, built in the caller's thread. The tier's oldest text leaves if it is full.

        Raises ValueError for an id outside the vocabulary or for more tokens than the tier holds, NoRoomError, OSError if the
        disk refuses them. Then nothing has changed."""
        filled = [document for document in documents if len(document)]  # an empty one would cost bytes
        with self._share.adding(sum(map(len, filled))):
            if (size := sum(map(len, filled))) > self.limits.live_tokens:
                raise ValueError(f"documents: {size} tokens exceed live_tokens, {self.limits.live_tokens}")
            if filled:
                self._live.warmup(filled)

    @property
    def live_tokens(self) -> int:
        """Tokens that the live tier holds now."""
        return self._texts.current.live.tokens

    def take(self, document: np.ndarray, provenance: np.ndarray) -> bool:
        """Adds an output of another service to the live tier; see LiveTier.take. Raises NoRoomError."""
        return self._live.take(document, provenance)

    @property
    def published(self) -> Published:
        """The outputs of this service's sessions."""
        return self._live.published

    def published_here(self, after: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Those that the live tier has, with numbers above `after`; see LiveView.published_here."""
        until = self._live.published.last  # before the view: it has all up to that
        return self._live.view.published_here(after, until) if until > after else iter(())

    def waiting(self, after: int, until: int) -> int:
        """How many the live tier has with numbers above `after`, up to `until`."""
        return self._live.view.count_published_here(after, until) if until > after else 0

    def settle(self) -> None:
        """Waits until the live tier has no merge to do."""
        self._live.settle()

    def compact(self) -> None:
        """Merges the live tier into as few segments as its policy permits, in the caller's thread."""
        self._live.compact()

    def expire(self) -> None:
        """Has text leave the live tier, workspaces and groups that has its greatest age; see LiveTier.expire."""
        oldest = time.time() - self.limits.live_seconds
        self._texts.workspaces.expire(oldest)
        self._texts.groups.expire(oldest)
        self._live.expire()

    @property
    def epoch(self) -> int:
        """The epoch of the weights: the greatest that a session was opened with."""
        return self._live.epoch

    def keep_epochs(self, keep: int) -> list[np.ndarray]:
        """Removes what the live tier has of all but the newest epochs; see LiveTier.keep_epochs. Raises ValueError for less than one."""
        if keep < 1:
            raise ValueError(f"keep: {keep} is below 1; the present epoch's text leaves with the tier alone")
        return self._live.keep_epochs(keep)

    def sync(self) -> None:
        """Makes closed sessions' outputs survive a power failure; see LiveTier.sync."""
        self._live.sync()

    def snapshot(self, name: str) -> tuple[Segment, ...]:
        """Keeps the live tier's text under a name; see LiveTier.snapshot."""
        return self._live.snapshot(name)

    def restore(self, name: str) -> tuple[Segment, ...]:
        """Replaces the live tier's text by a snapshot's; see LiveTier.restore."""
        return self._live.restore(name)

    def close(self) -> None:
        """Syncs the live tier and closes its store."""
        self._live.close()

    # All of it

    def flush(self, tier: Tier | None = None, session: str | None = None) -> None:
        """Forgets what was learned from serving: one tier's, one session's, or all of it (both None).

        Workspaces, and what groups have written so far, go with the live tier. The prior is emptied only if it is named. A flushed session is unknown afterwards; an unknown name is no error.
        Raises ValueError for a session together with a tier other than SESSION."""
        if session is not None:
            if tier not in (None, Tier.SESSION):
                raise ValueError(f"session: {session!r} has no part of tier {Tier(tier).name}")
            self._sessions.flush(session)
            return
        if tier in (None, Tier.SESSION):
            self._sessions.clear()
        if tier == Tier.PRIOR:
            self._texts.clear_prior()
        if tier == Tier.REJECTED:
            self._sessions.forget_refused()
        if tier in (None, Tier.LIVE):
            self._texts.workspaces.clear()
            self._texts.groups.clear()
            self._live.clear()

    def has_workspace(self, name: str) -> bool:
        """Whether there is text of that workspace."""
        return name in self._texts.workspaces

    def flush_workspace(self, name: str) -> None:
        """Forgets a workspace; an unknown name is no error."""
        self._texts.workspaces.forget(name)

    def forget(self, subjects: Collection[Subject]) -> list[np.ndarray]:
        """Forgets the text of subjects in sessions, conversations, the live tier and its snapshots, and all workspaces and what groups have
        written so far, which do not say whose text they have; returns the live tier's and the snapshots' documents. An open session of a subject is neither published
        nor kept when it ends, and adds nothing to a workspace or a group.

        Raises OSError, and what the store raises. Then they are still to be forgotten: by the next start, or by a repeated call."""
        self._sessions.forget(frozenset(subjects))
        self._texts.workspaces.clear()
        self._texts.groups.clear()
        return self._live.forget(subjects)

    def search(self, subjects: Collection[Subject], texts: Sequence[np.ndarray]) -> Found:
        """Looks for text of subjects, and for texts; see LiveTier.search."""
        return self._live.search(subjects, texts)

    def stats(self) -> EngineStats:
        counts, usage, texts = self._calls.counts(), self._sessions.usage(), self._texts.current
        sizes = _tier_sizes(self._texts.priors, texts.live, usage)
        damaged = {Tier.PRIOR: self._texts.damaged, Tier.LIVE: len(texts.live.damaged)}
        tiers = {
            tier: TierStats(
                *sizes[tier],
                counts.hits[tier],
                counts.drafted[tier],
                counts.accepted[tier],
                damaged.get(tier, 0),
            )
            for tier in Tier
        }
        logs = self._live.log_stats()
        return EngineStats(
            usage.sessions, usage.conversations, counts.drafts, self._live.merge_failures, tiers,
            logs.nbytes, logs.unsynced, self._live.log_failures, self._texts.unknown,
            len(self._texts.workspaces), self._texts.workspaces.tokens, self._texts.workspaces.nbytes,
            len(self._texts.groups), self._texts.groups.nbytes, self.epoch,
        )  # fmt: skip

    def _load_kernels(self) -> None:
        """Compiles what a step runs, or loads it from Numba's cache, so that no step waits for it."""
        SessionIndex().reserve(1 << 10)
        call = self._calls.take()
        call.begin()
        call.search(self._texts.current.table)
        call.run(0, EMPTY_TOKENS, self._weights)
        self._calls.give_back(call)


def _split_at_repeats(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Runs of entries in which no session occurs twice."""
    runs: list[list[Entry]] = [[]]
    names: set[str] = set()
    for entry in entries:
        if entry.session in names:
            runs.append([])
            names = set()
        runs[-1].append(entry)
        names.add(entry.session)
    return runs


def _tier_sizes(prior: Sequence[Segment], live: LiveView, usage: Usage) -> dict[Tier, tuple[int, int, int]]:
    """Tokens, bytes and segments of each tier. prior: the segments of all priors."""
    return {
        Tier.PRIOR: (sum(map(len, prior)), sum(segment.nbytes for segment in prior), len(prior)),
        Tier.LIVE: (live.tokens, live.nbytes, len(live.segments)),
        Tier.SESSION: (usage.tokens, usage.nbytes, 0),
        Tier.REJECTED: (usage.refused, usage.refused_nbytes, 0),
    }
