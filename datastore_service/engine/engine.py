"""The tiers of one namespace: applies what a step brings and drafts for it.

Readers and writers. What a query sees of the prior and live tiers is one immutable `_Snapshot`; a writer builds its
segment first and then replaces the snapshot. The engine's lock guards the session dictionary and the replacement, each
for microseconds; a session's own lock guards its index, and no kernel runs under the engine's lock. Locks are taken in
the order session, live tier, engine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from datastore_service.engine import batch
from datastore_service.engine.checking import check_entries, joined_tokens
from datastore_service.engine.conversations import Conversations
from datastore_service.engine.fusion import FusionWeights
from datastore_service.engine.live import LiveTier, LiveView
from datastore_service.engine.live_store import LiveStore
from datastore_service.engine.retrieval import MAX_SEGMENTS
from datastore_service.engine.segment import MAX_VOCAB, Segment, build_segment
from datastore_service.engine.session import MAX_TOKENS, SessionIndex
from datastore_service.protocol.tree import Tier
from datastore_service.protocol.types import EMPTY_TOKENS, Entry, Opening, Query, Reply, Status


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one namespace's memory. What would exceed the first three is answered OVER_BUDGET.

    tokens counts open sessions and retained conversations; the latter give way to the former. live_tokens: of closed
    sessions' outputs and warmed-up documents, of which the oldest give way; 0 keeps none. refusals: refused tokens kept of
    a session; 0, no rejected tier, because it gains nothing measurable (docs/optimisations.md)."""

    sessions: int = 4096
    session_tokens: int = 1 << 20
    tokens: int = 1 << 26
    live_tokens: int = 1 << 24
    conversations: int = 4096
    conversation_bytes: int = 1 << 30
    conversation_seconds: float = 3600.0
    refusals: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "session_tokens", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.session_tokens > MAX_TOKENS:
            raise ValueError(f"session_tokens: {self.session_tokens} exceeds {MAX_TOKENS}")
        for name in (
            "live_tokens",
            "conversations",
            "conversation_bytes",
            "conversation_seconds",
            "refusals",
        ):
            if not getattr(self, name) >= 0:  # NaN too
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 0")


@dataclass(frozen=True, slots=True)
class TierStats:
    """segments: of a segment tier, else 0. hits: drafts with at least one node of the tier. drafted: nodes of it.
    accepted: those on the path that the session's text then took through the draft it had last got, so also where the
    worker verified fewer of its nodes, or none. damaged: segments that were taken out, which the other figures leave out."""

    tokens: int = 0
    nbytes: int = 0
    segments: int = 0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """An open session. tokens: prompt, output and the conversation before them. nbytes: memory of its index."""

    name: str
    tokens: int
    prompt_length: int
    nbytes: int
    conversation: str
    publish: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """drafts: trees asked for since the start, empty ones included. merge_failures: of the live tier. SESSION counts
    conversations too. log_bytes: of the live tier's logs, of which a power failure would take log_unsynced_bytes.
    log_failures: outputs that could not be logged, and failed syncs."""

    sessions: int
    conversations: int
    drafts: int
    merge_failures: int
    tiers: dict[Tier, TierStats]
    log_bytes: int = 0
    log_unsynced_bytes: int = 0
    log_failures: int = 0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The texts a query sees; `table` holds their addresses."""

    prior: tuple[Segment, ...]
    live: LiveView
    table: np.ndarray

    @staticmethod
    def of(prior: tuple[Segment, ...], live: LiveView) -> _Snapshot:
        return _Snapshot(prior, live, batch.source_table(live.fresh, live.segments, prior))


class _Session:
    """An open session. counted: its part of the engine's session tokens. ended: its index may be another session's."""

    __slots__ = ("counted", "ended", "index", "lock", "name", "opening")

    def __init__(self, name: str, opening: Opening, index: SessionIndex) -> None:
        self.name = name
        self.opening = opening
        self.index = index
        self.counted = len(index)
        self.ended = False  # set and read under the lock
        self.lock = threading.Lock()


class Engine:
    """Sessions, live text and prior of one namespace. Every method may be called from any thread."""

    def __init__(
        self,
        vocab_size: int,
        prior: Sequence[Segment] = (),
        weights: FusionWeights | None = None,
        limits: Limits | None = None,
        store: LiveStore | None = None,
    ) -> None:
        """vocab_size: ids are in [0, vocab_size), at most 2^31. store: keeps the live tier beyond the process, None for
        in memory alone. Raises ValueError naming field and limit, and what the store raises for text it cannot read."""
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size: {vocab_size} is outside 1..{MAX_VOCAB}")
        self.vocab_size = vocab_size
        self.limits = limits or Limits()
        self._weights = (weights or FusionWeights()).packed()
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._session_tokens = 0
        self._conversations = Conversations(
            self.limits.conversations, self.limits.conversation_bytes, self.limits.conversation_seconds
        )
        self._works: list[batch.Work] = []
        self._idle: list[batch.Work] = []
        self._snapshot = _Snapshot.of((), LiveView())
        self._damaged_prior = 0
        self._live = LiveTier(vocab_size, self.limits.live_tokens, self._live_changed, store)
        self.set_prior(prior)
        self._load_kernels()

    def step(self, entries: Sequence[Entry]) -> list[Reply]:
        """Applies the entries in order, drafts for those with a budget and answers their queries, of which nothing is kept
        or counted; one Reply an Entry, in the same order.

        A Reply's tree is empty before the session has a token and where nothing matches. Its probabilities estimate
        how likely the target accepts the path up to a node, so their sum over the k likeliest nodes estimates the
        tokens that a draft of k nodes adds to the step.

        Raises ValueError naming the field and its limit before anything is applied."""
        if not entries:
            return []
        asked = check_entries(entries, self.vocab_size)
        tokens = joined_tokens(entries, asked, self.vocab_size)
        if len({entry.session for entry in entries}) == len(entries):
            return self._step_distinct(entries, asked, tokens)
        replies: list[Reply] = []
        for distinct in _split_at_repeats(entries):
            tokens = joined_tokens(distinct, asked, self.vocab_size)
            replies += self._step_distinct(distinct, asked, tokens)
        return replies

    def set_prior(self, segments: Sequence[Segment]) -> None:
        """Replaces the prior; steps in progress finish with the one they began with."""
        self._check_segments(segments)
        with self._lock:
            self._snapshot = _Snapshot.of(tuple(segments), self._snapshot.live)
            self._damaged_prior = 0

    def segments(self) -> tuple[Segment, ...]:
        """What queries see of the prior and the live tier, fresh text excepted."""
        snapshot = self._snapshot
        return snapshot.prior + snapshot.live.segments

    def take_out(self, damaged: set[Segment]) -> None:
        """Ends the use of those of the segments that are the engine's; steps in progress finish with what they began with.
        The stats count them."""
        with self._lock:
            left = tuple(segment for segment in self._snapshot.prior if segment not in damaged)
            self._damaged_prior += len(self._snapshot.prior) - len(left)
            self._snapshot = _Snapshot.of(left, self._snapshot.live)
        self._live.take_out(damaged)

    def warmup(self, documents: Iterable[np.ndarray]) -> None:
        """Adds documents to the live tier as one segment, built in the caller's thread. The tier's oldest text leaves
        if it is full.

        Raises ValueError for an id outside the vocabulary or for more tokens than the tier holds, OSError if the disk
        refuses them; then nothing has changed."""
        segment = build_segment(
            [d for d in documents if len(d)], self.vocab_size
        )  # empty ones would cost bytes
        if len(segment) > self.limits.live_tokens:
            raise ValueError(
                f"documents: {len(segment)} tokens exceed live_tokens, {self.limits.live_tokens}"
            )
        if len(segment):
            self._live.warmup(segment)

    def settle(self) -> None:
        """Waits until the live tier has no merge to do."""
        self._live.settle()

    def compact(self) -> None:
        """Merges the live tier into as few segments as its policy permits, in the caller's thread."""
        self._live.compact()

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
        """Syncs the live tier and lets go of its store."""
        self._live.close()

    def flush(self, tier: Tier | None = None, session: str | None = None) -> None:
        """Forgets what was learned from serving: one tier's, one session's, or all of it (both None).

        The prior is emptied only when it is named. A flushed session is unknown afterwards; an unknown name is no
        error. Raises ValueError for a session together with a tier other than SESSION."""
        if session is not None:
            if tier not in (None, Tier.SESSION):
                raise ValueError(f"session: {session!r} has no part of tier {Tier(tier).name}")
            with self._lock:
                if session in self._sessions:
                    self._forget(self._sessions[session])
            return
        with self._lock:
            if tier in (None, Tier.SESSION):
                self._sessions.clear()
                self._conversations.clear()
                self._session_tokens = 0
            if tier == Tier.PRIOR:
                self._snapshot = _Snapshot.of((), self._snapshot.live)
        if tier == Tier.REJECTED:
            self._forget_refused()
        if tier in (None, Tier.LIVE):
            self._live.clear()

    def _forget_refused(self) -> None:
        with self._lock:
            opened = list(self._sessions.values())
        for session in opened:
            with session.lock:
                if not session.ended:
                    session.index.forget_refused()

    def sessions(self) -> list[SessionInfo]:
        """The open sessions, oldest first."""
        with self._lock:
            opened = list(self._sessions.values())
        return [
            SessionInfo(
                session.name, len(session.index), session.opening.prompt_length,
                session.index.nbytes + session.index.refused_nbytes, session.opening.conversation, session.opening.publish,
            )
            for session in opened
        ]  # fmt: skip

    def has_session(self, name: str) -> bool:
        """Whether a session of that name is open."""
        return name in self._sessions

    def stats(self) -> EngineStats:
        counts = batch.counts(self._works)
        with self._lock:
            snapshot, conversations = self._snapshot, self._conversations
            opened = list(self._sessions.values())
            tokens, nbytes = self._session_tokens + conversations.tokens, conversations.nbytes
        nbytes += sum(session.index.nbytes for session in opened)
        size = {
            Tier.PRIOR: _segment_size(snapshot.prior),
            Tier.LIVE: (snapshot.live.tokens, snapshot.live.nbytes, len(snapshot.live.segments)),
            Tier.SESSION: (tokens, nbytes, 0),
            Tier.REJECTED: (
                sum(len(session.index.refused) for session in opened),
                sum(session.index.refused_nbytes for session in opened),
                0,
            ),
        }
        damaged = {Tier.PRIOR: self._damaged_prior, Tier.LIVE: len(snapshot.live.damaged)}
        tiers = {
            tier: TierStats(
                *size[tier],
                counts.hits[tier],
                counts.drafted[tier],
                counts.accepted[tier],
                damaged.get(tier, 0),
            )
            for tier in Tier
        }
        logs = self._live.log_stats()
        return EngineStats(
            len(opened), len(conversations), counts.drafts, self._live.failures, tiers,
            logs.nbytes, logs.unsynced, self._live.log_failures,
        )  # fmt: skip

    def _load_kernels(self) -> None:
        """Compiles what a step runs, or loads it from Numba's cache, so that no step waits for it."""
        SessionIndex().reserve(1 << 10)
        work = self._take_work()
        work.begin()
        work.run(0, EMPTY_TOKENS, self._snapshot.table, self._weights)
        self._idle.append(work)

    def _check_segments(self, segments: Sequence[Segment]) -> None:
        if len(segments) > MAX_SEGMENTS:
            raise ValueError(f"segments: {len(segments)} exceed the limit of {MAX_SEGMENTS}")
        for segment in segments:
            if segment.vocab_size > self.vocab_size:
                raise ValueError(
                    f"segments: a vocabulary of {segment.vocab_size} exceeds the engine's {self.vocab_size}"
                )

    # One batch of distinct sessions

    def _step_distinct(self, entries: Sequence[Entry], asked: int, tokens: np.ndarray) -> list[Reply]:
        """asked: 0 if there are no queries. tokens: of `joined_tokens`."""
        sessions = self._hold(entries)
        try:
            replies = self._answer(entries, sessions, asked, tokens)
            for row, entry in enumerate(entries):
                session = sessions[row]
                if entry.closing and session is not None and (failure := self._close(session)):
                    replies[row] = replace(replies[row], status=failure, known=0)
        finally:
            _release(sessions)
        return replies

    def _hold(self, entries: Sequence[Entry]) -> list[_Session | None]:
        """The entries' sessions, locked. Those that another step closed while this one waited are looked for again."""
        while True:
            sessions = self._find(entries)
            held = [session for session in sessions if session is not None]
            held.sort(key=id)  # one order for all callers: no deadlock
            for session in held:
                session.lock.acquire()
            if not any(session.ended for session in held):
                return sessions
            _release(sessions)

    def _find(self, entries: Sequence[Entry]) -> list[_Session | None]:
        with self._lock:
            known = self._sessions
            return [
                known.get(entry.session)
                if entry.opening is None
                else self._find_or_open(entry, entry.opening)
                for entry in entries
            ]

    def _find_or_open(self, entry: Entry, opening: Opening) -> _Session | None:
        """The session that the entry opens, None if there is no room. Called under the engine's lock."""
        session = self._sessions.get(entry.session)
        if session and _continues(session.index, entry):
            return session
        if session:
            self._forget(session)
        if len(self._sessions) >= self.limits.sessions:
            return None
        session = _Session(entry.session, opening, self._opened_index(entry, opening))
        self._sessions[entry.session] = session
        self._session_tokens += session.counted
        return session

    def _opened_index(self, entry: Entry, opening: Opening) -> SessionIndex:
        index = self._conversations.take(opening.conversation) if opening.conversation else None
        if index is None or len(index) + len(entry.tokens) >= self.limits.session_tokens:
            return SessionIndex()
        if not _begins_with(entry, index.text()):
            index.begin_document()
        return index

    def _answer(
        self, entries: Sequence[Entry], sessions: Sequence[_Session | None], asked: int, tokens: np.ndarray
    ) -> list[Reply]:
        """Appends what the entries bring and drafts, in one kernel call."""
        statuses, spans = self._accept(entries, sessions)
        work = self._take_work()
        work.begin()
        for entry, session, status, (begin, end) in zip(entries, sessions, statuses, spans, strict=True):
            if session is None or status is not Status.OK:
                work.add_nothing()
                continue
            index, budget = session.index, entry.budget
            index.reserve(end - begin, budget.nodes, _longest(entry.queries) if entry.queries else 0)
            if entry.rejected and self.limits.refusals:
                self._refuse(entry, index, end - begin)
            work.add(index, begin, end, budget)
        if asked:
            _add_queries(work, entries, sessions, statuses)
        snapshot = self._snapshot  # held until the kernel returns: its table has only addresses
        trees = work.run(len(entries), tokens, snapshot.table, self._weights)
        self._idle.append(work)
        replies = [
            Reply(status, 0 if session is None else session.index.known, tree)
            for session, status, tree in zip(sessions, statuses, trees, strict=False)
        ]
        if asked:
            answers = iter(trees[len(entries) :])
            for entry, reply in zip(entries, replies, strict=True):
                reply.trees = tuple(islice(answers, len(entry.queries)))
        return replies

    def _refuse(self, entry: Entry, index: SessionIndex, new: int) -> None:
        for refused in entry.rejected:
            if refused.position < index.known + new:
                index.refuse(refused.position, refused.tokens, self.limits.refusals)

    def _take_work(self) -> batch.Work:
        try:
            return self._idle.pop()
        except IndexError:
            self._works.append(batch.Work())
            return self._works[-1]

    def _accept(
        self, entries: Sequence[Entry], sessions: Sequence[_Session | None]
    ) -> tuple[list[Status], list[tuple[int, int]]]:
        """What becomes of each entry, and which of the step's tokens it adds; they are counted."""
        statuses, spans, end = [], [], 0
        with self._lock:
            for entry, session in zip(entries, sessions, strict=True):
                begin, end = end, end + len(entry.tokens)
                status = Status.OK
                if session is None:
                    status = Status.OVER_BUDGET if entry.opening else Status.UNKNOWN_SESSION
                elif (skipped := session.index.known - entry.start) < 0:
                    status = Status.GAP
                else:
                    begin = min(begin + skipped, end)
                    if begin < end and not self._take_room(session, end - begin):
                        status = Status.OVER_BUDGET
                statuses.append(status)
                spans.append((begin, end))
        return statuses, spans

    def _take_room(self, session: _Session, extra: int) -> bool:
        """Counts tokens that a session adds, at the cost of retained conversations; False if there is no room. Called
        under the engine's lock."""
        if len(session.index) + extra > self.limits.session_tokens:
            return False
        if self._sessions.get(session.name) is not session:
            return True  # flushed since it was found: it lives until this step ends and counts no more
        if self._session_tokens + extra > self.limits.tokens:
            return False
        session.counted += extra
        self._session_tokens += extra
        while self._session_tokens + self._conversations.tokens > self.limits.tokens:
            self._conversations.drop_oldest()
        return True

    # Ends

    def _close(self, session: _Session) -> Status | None:
        """Ends a session; why its output is not published, None if all is well."""
        opening = session.opening
        output = session.index.text()[opening.prompt_length :].copy() if opening.publish else EMPTY_TOKENS
        with self._lock:
            if self._sessions.get(session.name) is not session:
                return Status.UNKNOWN_SESSION  # flushed during this step, and its text with it
            self._forget(session)
            session.ended = True
            session.index.forget_drafting()
            if opening.conversation and len(session.index):
                self._conversations.keep(opening.conversation, session.index)
        return None if self._live.publish(output) else Status.OVER_BUDGET

    def _live_changed(self, live: LiveView) -> None:
        with self._lock:
            self._snapshot = _Snapshot.of(self._snapshot.prior, live)

    def _forget(self, session: _Session) -> None:
        del self._sessions[session.name]
        self._session_tokens -= session.counted


def _release(sessions: Sequence[_Session | None]) -> None:
    for session in sessions:
        if session is not None:
            session.lock.release()


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


def _add_queries(
    work: batch.Work,
    entries: Sequence[Entry],
    sessions: Sequence[_Session | None],
    statuses: Sequence[Status],
) -> None:
    """The queries, whose tokens stand behind all entries' in a step's (see `joined_tokens`)."""
    end = sum(len(entry.tokens) for entry in entries)
    for entry, session, status in zip(entries, sessions, statuses, strict=True):
        committed = EMPTY_TOKENS
        if entry.queries and session is not None:
            committed = session.index.text()[entry.start + len(entry.tokens) :]
        for query in entry.queries:
            begin, end = end, end + len(query.tokens)
            if session is None or status is not Status.OK or not _agrees(query.tokens, committed):
                work.add_nothing()
            else:
                work.add(session.index, begin + len(committed), end, query.budget)


def _longest(queries: Sequence[Query]) -> int:
    return max(len(query.tokens) for query in queries)


def _agrees(tokens: np.ndarray, committed: np.ndarray) -> bool:
    """Whether a query goes on as the text does that is known beyond its entry's."""
    return len(committed) == 0 or np.array_equal(tokens[: len(committed)], committed)


def _continues(index: SessionIndex, entry: Entry) -> bool:
    """Whether an opening that names an open session repeats or extends its text (a lost reply), not a new text."""
    known = index.text()[entry.start :]
    shared = min(len(known), len(entry.tokens))
    return bool(np.array_equal(known[:shared], entry.tokens[:shared]))


def _begins_with(entry: Entry, text: np.ndarray) -> bool:
    return (
        entry.start == 0
        and len(entry.tokens) >= len(text)
        and np.array_equal(entry.tokens[: len(text)], text)
    )


def _segment_size(segments: tuple[Segment, ...]) -> tuple[int, int, int]:
    return sum(map(len, segments)), sum(segment.nbytes for segment in segments), len(segments)
