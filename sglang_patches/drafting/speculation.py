"""The worker's end of the draft side: what it is told, and the cache that its growth fills.

A look-up is local. It answers at once even if the draft side has just died.

On an accelerator a courier's thread brings a verification's outcome before the worker reads it (`step/courier.py`). Both threads
use one cache, one at a time. What holds:

- The cache alone decides whether an outcome was foreseen, and so its epoch. Whoever brings the outcome puts the growth that has
  come into the cache first, advances it, and sends the epoch that it then has. So growth that answers the message finds the trie
  it was made for, whether the worker has read the outcome or not.
- The tokens of a step advance a trie once, and are sent once. The worker compares its own outcome with what the courier told.
- The courier may be wrong: SGLang drops the last step of a request that it retracts. What it told is kept until the worker has the
  outcome of that step. If the worker finds other tokens, or looks up a tree without new tokens, the session is opened again.
- The courier tells the outcome of the last verification alone, before the worker uses the cache for the next step, and of sessions
  that have not been closed or moved since the launch. It reads no text of a request, and opens no session: those that the draft
  side has lost wait for the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from prometheus_client import Counter

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import MAX_VOCAB, SessionName
from sglang_patches.drafting.cache import SpeculationCache
from sglang_patches.drafting.seams import DraftChannel, Patience
from sglang_patches.exchange.messages import (
    Closed,
    Committed,
    Expected,
    Growth,
    Message,
    Opened,
    Sampling,
    Verifying,
)
from sglang_patches.ledger.outcome import Follower, Outcome
from sglang_patches.ledger.requests import DraftSource, RequestState
from sglang_patches.ledger.usage import DRAFT_MODEL

LOOKUPS = Counter(
    "specstore_speculation_lookups",
    "Look-ups in the speculation cache: hit, miss, or a miss for which the draft model was waited for (waited)",
    ["result"],
)
_HIT, _WAITED, _MISS = map(LOOKUPS.labels, ("hit", "waited", "miss"))
EARLY = Counter(
    "specstore_early_outcomes",
    "Outcomes that the draft process was to hear of before the next step, on an accelerator: told in time, or late",
    ["result"],
)
_TOLD, _LATE = map(EARLY.labels, ("told", "late"))


class Flight(NamedTuple):
    """A verification on its way. starts: tokens of each request before it."""

    states: Sequence[RequestState]
    starts: Sequence[int]


class Choices(NamedTuple):
    """What may follow the rows of a verification that an early exit read, the likeliest first. rows: int64 [read], ascending, among those
    of all requests. tokens: int32 [read, choices]. probabilities: float32 [read, choices]."""

    rows: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray


@dataclass(slots=True, eq=False)
class _Session:
    """One request, as the draft side has been told of it.

    opened: the epoch in which it was told of. What an earlier one's messages lost has been told again.
    over: its last token was told of; SGLang may run it once more.
    read: whether the draft model has drafted for it, and so has read its text.
    lost: whether it is to be opened again.
    ahead: what a courier told of and the worker has not read: tokens before the step, and its own.
    """

    state: RequestState
    opened: int
    over: bool = False
    read: bool = False
    lost: bool = False
    ahead: tuple[int, np.ndarray] | None = None


class _Verified(NamedTuple):
    """The last verification that was launched. told: sessions whose tree the draft side has been told."""

    states: Sequence[RequestState]
    told: Sequence[_Session]


_NOTHING = _Verified((), ())


class Speculation(Follower):
    """The draft side as the worker sees it: what it is told, and what is looked up.

    All but `outcomes_ahead` is for the worker's thread.

    nodes: most of a tree.
    sampling_of: how the target draws a request's tokens.
    now: seconds by a steady clock.
    vocabulary: number of token ids.
    """

    def __init__(
        self,
        channel: DraftChannel,
        nodes: int,
        sampling_of: Callable[[RequestState], Sampling],
        now: Callable[[], float] = time.monotonic,
        vocabulary: int = MAX_VOCAB,
    ) -> None:
        self._channel, self._now = channel, now
        self._nodes = nodes
        self._sampling_of = sampling_of
        self._cache = SpeculationCache(vocabulary)
        self._sessions: dict[SessionName, _Session] = {}
        self._waited = 0.0  # seconds, in the last look-up
        self._lock = threading.RLock()
        self._flight: Flight | None = None  # that a courier may tell of
        self._shown: list[_Session] = []  # that were looked up for this step
        self._verified = _NOTHING
        self._early: tuple[Sequence[RequestState], np.ndarray, Choices] | None = None

    def open(self, states: Iterable[RequestState]) -> None:
        """Begins with the requests' texts as far as their outcome is known."""
        with self._lock:
            followed = [
                state for state in states if state.takes_from(DraftSource.DRAFT_MODEL) and not state.ended
            ]
            self._channel.post([self._opened(state) for state in followed])

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        with self._lock:
            self._flight, self._verified = None, _NOTHING
            self._take(0.0)  # what the outcomes' epochs still have to come
            news = [outcome for outcome in outcomes if not self._was_told(outcome)]
            self._channel.post(
                [
                    self._committed(outcome.request, outcome.start, outcome.tokens)
                    for outcome in news
                    if self._follows(outcome.request)
                ]
            )

    def launched(self, states: Sequence[RequestState]) -> Flight:
        """A verification whose outcome may come ahead."""
        with self._lock:
            self._flight = Flight(states, [state.settled for state in states])
            return self._flight

    def outcomes_ahead(self, flight: Flight, emitted: Sequence[np.ndarray]) -> None:
        """The outcomes of a verification, before the worker has them. From any thread. emitted: int32, each request's tokens."""
        with self._lock:
            if flight is not self._flight:
                _LATE.inc(len(emitted))
                return
            self._flight, self._verified = None, _NOTHING
            self._take(0.0)
            messages = []
            for state, start, tokens in zip(*flight, emitted, strict=True):
                if self._follows(state) and self._cache.trie(state.session).length == start:
                    messages.append(self._committed(state, start, tokens))
                    self._sessions[state.session].ahead = start, tokens
            _TOLD.inc(len(messages))
            self._channel.post(messages)

    def _session(self, state: RequestState) -> _Session | None:
        """What the draft side has been told of this very request: another may have had its name."""
        session = self._sessions.get(state.session)
        return session if session is not None and session.state is state else None

    def _follows(self, state: RequestState) -> bool:
        """Whether the draft side follows the request."""
        session = self._session(state)
        return session is not None and not session.over

    def _was_told(self, outcome: Outcome) -> bool:
        """Whether a courier told of the outcome. If it told of another one, the session is opened again."""
        session = self._session(outcome.request)
        if session is None or session.ahead is None:
            return False
        (start, tokens), session.ahead = session.ahead, None
        if start == outcome.start and np.array_equal(tokens, outcome.tokens[: len(tokens)]):
            return len(tokens) == len(outcome.tokens)
        self.open([outcome.request])
        return True

    def _committed(self, state: RequestState, start: int, tokens: np.ndarray) -> Message:
        """A request that is over is forgotten at once: overlap scheduling runs it once more, for nothing."""
        session = state.session
        if not state.ends.isdisjoint(tokens.tolist()):
            self._cache.close(session)
            self._sessions[session] = _Session(state, 0, over=True)
            return Closed(session)
        self._cache.advance(session, start, tokens)
        return Committed(session, start, tokens, self._cache.trie(session).epoch)

    def look_up(
        self,
        states: Sequence[RequestState],
        depths: Sequence[int],
        patience: Callable[[Sequence[RequestState], Sequence[int]], Patience],
    ) -> list[DraftTree]:
        """A tree for each request, empty where the outcome was not foreseen. depths: most levels of its tree. patience: how long
        to wait for the missing trees, given the requests and the rows of the missing trees. Nothing waits for the draft model to read
        a prompt: that takes it many times as long as a draft."""
        with self._lock:
            self._flight = None
            self.open([state for state in states if self._must_open(state)])
            self._take(0.0)
            self._open_lost()
            self._shown = [self._sessions[state.session] for state in states if self._follows(state)]
            trees = self._trees(states, depths)
            missing = [
                row for row, depth in enumerate(depths) if self._missing(states[row], trees[row], depth)
            ]
            awaited = [row for row in missing if self._sessions[states[row].session].read]
            seconds, nodes = patience(states, awaited)
            began = self._now()
            while any(len(trees[row]) < min(nodes, depths[row], self._nodes) for row in awaited):
                if (wait := began + seconds - self._now()) <= 0 or not self._take(wait):
                    break
                trees = self._trees(states, depths)
            self._waited = self._now() - began
        for row, tree in enumerate(trees):
            session = self._session(states[row])
            if session is None or not session.over:
                (_MISS if not len(tree) else _WAITED if row in missing else _HIT).inc()
        return trees

    def verification_launched(self, states: Sequence[RequestState]) -> None:
        """Tells the draft side which trees are verified, and puts those that came from elsewhere into the cache."""
        with self._lock:
            shown, self._shown = self._shown, []
            told = [session for session in shown if self._follows(session.state)]
            self._channel.post([self._verifying(session) for session in told])
            self._verified = _Verified(states, told)
            early, self._early = self._early, None
            if early is not None and early[0] is states:
                self.expected(*early)

    def seconds_waited(self) -> float:
        """Seconds that the look-up before this launch waited; 0 if there was none."""
        waited, self._waited = self._waited, 0.0
        return waited

    @property
    def looked_up(self) -> bool:
        """Whether the draft side hears of the step that begins."""
        return bool(self._shown or self._verified.told)

    def expected(self, states: Sequence[RequestState], packed: np.ndarray, choices: Choices) -> None:
        """Tells the draft side what an early exit expects of these requests' step, while it is under way. From any thread.

        states: the list that `verification_launched` gets. packed: the step's trees as from `layout.pack`.
        """
        with self._lock:
            if states is not self._verified.states:  # its launch is not told yet, or it is over
                self._early = states, packed, choices
                return
            self._channel.post(
                [
                    self._expected(state, tree, of_state)
                    for state, tree, of_state in zip(
                        states, packed, _by_request(packed, choices), strict=True
                    )
                    if len(of_state.rows)
                    and self._follows(state)
                    and self._session(state) in self._verified.told
                ]
            )

    def _expected(self, state: RequestState, tree: np.ndarray, choices: Choices) -> Expected:
        trie = self._cache.trie(state.session)
        nodes = [trie.root]
        for token, parent in tree.T.tolist():
            if parent < -1:  # padding
                break
            below = trie.child(nodes[parent + 1], token)
            if below is None:  # the cache was full
                break
            nodes.append(below)
        known = choices.rows < len(nodes)
        return Expected(
            state.session,
            trie.epoch,
            trie.root,
            np.array(nodes, np.int64)[choices.rows[known]],
            choices.tokens[known].ravel(),
            choices.probabilities[known].ravel(),
        )

    def _verifying(self, session: _Session) -> Verifying:
        state = session.state
        trie, tree = self._cache.trie(state.session), state.tree
        parents, nodes = np.empty(len(tree), np.int64), np.empty(len(tree), np.int64)
        rows = zip(tree.parents.tolist(), tree.tokens.tolist(), tree.probs.tolist(), strict=True)
        for at, (parent, token, estimate) in enumerate(rows):
            above = trie.root if parent < 0 else int(nodes[parent])
            there = trie.child(above, token)
            parents[at], nodes[at] = above, trie.graft(above, token, estimate) if there is None else there
        return Verifying(state.session, trie.epoch, nodes, parents, tree.tokens)

    def taken_back(self, states: Iterable[RequestState]) -> None:
        """Their last step did not happen: they begin again."""
        self.open(states)

    def close(self, states: Iterable[RequestState]) -> None:
        with self._lock:
            ended = [state.session for state in states if self._follows(state)]
            for state in states:
                if self._session(state) is not None:
                    self._cache.close(state.session)
                    del self._sessions[state.session]
            self._channel.post([Closed(session) for session in ended])

    drop = close

    def _must_open(self, state: RequestState) -> bool:
        """What a courier told of and the worker has not read by now did not happen."""
        session = self._session(state)
        return session is None or session.ahead is not None

    def _opened(self, state: RequestState) -> Opened:
        trie = self._cache.open(state.session, state.settled)
        self._sessions[state.session] = _Session(state, trie.epoch)
        text, sampling = state.text.between(0, state.settled), self._sampling_of(state)
        published_from = state.opening.prompt_length if state.opening.publish else None
        return Opened(state.session, text, trie.epoch, sampling, published_from, state.tenant)

    def _take(self, seconds: float) -> bool:
        """Puts growth into the cache; whether anything came."""
        answers = self._channel.collect(seconds)
        for answer in answers:
            came = isinstance(answer, Growth) and self._cache.grow(answer)
            session = self._sessions.get(answer.session)
            if session is not None and not session.over:
                session.read |= came
                session.lost |= not came and answer.epoch >= session.opened
        return bool(answers)

    def _open_lost(self) -> None:
        """Once a step, however often the draft side says it: each time its whole text is sent."""
        self.open([session.state for session in list(self._sessions.values()) if session.lost])

    def _trees(self, states: Sequence[RequestState], depths: Sequence[int]) -> list[DraftTree]:
        return [self._tree(state, depth) for state, depth in zip(states, depths, strict=True)]

    def _missing(self, state: RequestState, tree: DraftTree, depth: int) -> bool:
        """Whether the draft side may still send a tree."""
        return not len(tree) and depth > 0 and self._follows(state)

    def _tree(self, state: RequestState, depth: int) -> DraftTree:
        if not self._follows(state):
            return EMPTY_TREE
        return self._cache.subtree(state.session, self._nodes, depth, DRAFT_MODEL)


def _by_request(packed: np.ndarray, choices: Choices) -> list[Choices]:
    """The choices of each request, whose rows are those of its own tree."""
    width = packed[0].shape[1] + 1
    rows, tokens, probabilities = choices
    parts = np.searchsorted(rows, width * np.arange(1, len(packed)))
    split = (np.split(values, parts) for values in (rows % width, tokens, probabilities))
    return [Choices(*of) for of in zip(*split, strict=True)]
