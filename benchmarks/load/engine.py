"""A simulated engine: one Draft stream, and a batch of sessions that all take a step together."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.playback import Playback
from benchmarks.traces import Trace
from datastore_service.client.base import DatastoreError
from datastore_service.client.remote import GrpcDatastore
from datastore_service.protocol.types import Budget, Entry, Opening, Reply, Status
from sglang_patches.ledger.outcome import settle

CONNECT_SECONDS = 60.0
SHARED = 0.25  # of the answers: a token that so many have keeps its id
ANSWER_SECONDS = 30.0  # longer than any answer takes: latencies have no ceiling


@dataclass(frozen=True)
class Level:
    """A load for some time. rate: steps per second of each stream. start, end: of time.monotonic()."""

    rate: float
    start: float
    end: float


@dataclass
class Taken:
    """Steps that were taken. latencies: seconds from sending a step to having read its answer. late: seconds by which the step
    was sent after it was due, which is the client's own delay. tokens: decoded. session_steps: of all sessions. refused:
    entries by the status that is not OK. missed: answers after the deadline. broken: streams that ended."""

    latencies: array = field(default_factory=lambda: array("d"))
    late: array = field(default_factory=lambda: array("d"))
    tokens: int = 0
    session_steps: int = 0
    refused: Counter = field(default_factory=Counter)
    missed: int = 0
    broken: int = 0

    def add(self, other: Taken) -> None:
        self.latencies.extend(other.latencies)
        self.late.extend(other.late)
        self.refused.update(other.refused)
        self.tokens += other.tokens
        self.session_steps += other.session_steps
        self.missed += other.missed
        self.broken += other.broken


class Texts:
    """What the sessions of a load say: recorded answers in a random order, each told of other things; always the same for a seed.

    There are fewer recorded answers than sessions. Said again as they are, they would be found whole in the live tier, and all drafts
    would be right. So each session has names of its own for the tokens that few answers share: the repetitions within an answer and
    the phrases that many answers share stay, the rest is new."""

    def __init__(self, traces: Sequence[Trace], vocab_size: int, seed: Sequence[int]) -> None:
        self._texts = [np.concatenate([trace.prompt, trace.output]) for trace in traces]
        self._prompts = [len(trace.prompt) for trace in traces]
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        counts = np.zeros(vocab_size, np.int64)
        for text in self._texts:
            counts[np.unique(text)] += 1
        self._shared = counts >= SHARED * len(traces)

    def next(self) -> tuple[np.ndarray, int]:
        """int32 token ids of a prompt and its answer, and the prompt's length."""
        number = self._rng.integers(len(self._texts))
        text, shift = self._texts[number], self._rng.integers(self._vocab_size)
        renamed = np.where(self._shared[text], text, (text + shift) % self._vocab_size)
        return renamed.astype(np.int32), self._prompts[number]

    def somewhere(self, first: int, end: int) -> int:
        """A random number from `first` to below `end`: how far a session is when the load begins."""
        return int(self._rng.integers(first, end))


class Engine:
    """Its next step is due an interval after the last one was, or later by as much as the answer takes longer: so an engine
    decodes. Where the client is late it catches up, so that its delays do not lower the rate. An answer after the deadline is waited
    for and counted, but its drafts are not used. A session that ends is closed in the message in which another takes its place.
    name: the beginning of its sessions' names."""

    def __init__(
        self, name: str, datastore: GrpcDatastore, texts: Texts, sessions: int, nodes: int, deadline: float
    ) -> None:
        """deadline: seconds."""
        self._name, self._datastore, self._texts = name, datastore, texts
        self._budget, self._deadline = Budget(nodes), deadline
        self._begun = 0
        self._closing: list[Entry] = []
        self._sessions = [self._begin(anywhere=True) for _ in range(sessions)]

    def open(self) -> None:
        """Connects and opens its sessions. Raises DatastoreError if the service does not take the stream."""
        self._connect()
        self._exchange(Taken())

    def run(self, level: Level, phase: float) -> Taken:
        """phase: of its first step, the share of an interval after the level's start."""
        taken, interval = Taken(), 1 / level.rate
        due = level.start + phase * interval
        while max(due, time.monotonic()) < level.end:
            time.sleep(max(0.0, due - time.monotonic()))
            taken.late.append(time.monotonic() - due)
            due += max(interval, self._exchange(taken))
        return taken

    def _connect(self) -> None:
        if not self._datastore.wait_connected(CONNECT_SECONDS):
            raise DatastoreError(f"stream {self._name}: {self._datastore.disconnect_reason}")

    def _begin(self, anywhere: bool = False) -> Playback:
        """anywhere: in its answer, as sessions are that began at different times."""
        self._begun += 1
        text, prompt = self._texts.next()
        known = self._texts.somewhere(prompt, len(text)) if anywhere else prompt
        return Playback(f"{self._name}-{self._begun}", text, known, Opening(prompt_length=prompt))

    def _exchange(self, taken: Taken) -> float:
        """A step. How many seconds the engine waited for it."""
        entries = [session.entry(self._budget) for session in self._sessions] + self._closing
        sent = time.monotonic()
        try:
            replies = self._datastore.step(entries, ANSWER_SECONDS)
        except DatastoreError:
            taken.broken += 1
            self._start_again()
            return time.monotonic() - sent
        waited = time.monotonic() - sent
        taken.latencies.append(waited)
        taken.session_steps += len(self._sessions)
        missed = waited > self._deadline
        taken.missed += missed
        taken.refused.update(reply.status.name for reply in replies if reply.status is not Status.OK)
        self._advance(replies[: len(self._sessions)], taken, missed)
        return waited

    def _advance(self, replies: list[Reply], taken: Taken, missed: bool) -> None:
        """Decodes, and replaces the sessions that have ended or were refused."""
        trees = [reply.tree for reply in replies]
        following = [session.following for session in self._sessions]
        outcomes = settle([None] * len(trees), trees, [0] * len(trees), following)
        self._closing = []
        for place, (session, reply, outcome) in enumerate(
            zip(self._sessions, replies, outcomes, strict=True)
        ):
            taken.tokens += session.advance(1 if missed else int(outcome.accepted.sum()) + 1)
            if reply.status is not Status.OK:
                self._sessions[place] = self._begin()
            elif session.ended:
                self._closing.append(session.closing())
                self._sessions[place] = self._begin()

    def _start_again(self) -> None:
        """On a new stream, with new sessions."""
        self._connect()
        self._closing = []
        self._sessions = [self._begin(anywhere=True) for _ in self._sessions]
