"""The datastore's side: what it has been told of each request, and its trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from datastore_service.client import Datastore, Texts
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget, Entry, Query, Rejected, SessionName
from sglang_patches.drafting.seams import Fallback
from sglang_patches.drafting.union import Part
from sglang_patches.ledger.outcome import Follower, Outcome
from sglang_patches.ledger.requests import DraftSource, RequestState
from sglang_patches.metrics import RETRIEVE, PhaseClock


@dataclass(slots=True, eq=False)
class _Sent:
    """What the datastore has been told of one request.

    tokens: leading ones of its text.
    refused: tokens of the tree that was verified since then. An empty tuple is news as well: a draft was verified.
    """

    state: RequestState
    tokens: int = 0
    refused: tuple[Rejected, ...] | None = None


class DatastoreFeed(Follower, Texts):
    """Tells the datastore of every request's text, each token once, and again what a service has lost.

    opened: makes the datastore, which reads here what it has been told.
    deadline: seconds that a step may wait for its trees.
    """

    def __init__(self, opened: Callable[[Texts], Datastore], deadline: float) -> None:
        self._sent: dict[SessionName, _Sent] = {}  # by session
        self._deadline = deadline
        self.datastore = opened(self)

    def told(self, session: str, known: int) -> Entry | None:
        sent = self._sent.get(session)
        if sent is None:
            return None
        state = sent.state
        tokens, opening = state.text.between(known, sent.tokens), None if known else state.opening
        return Entry(session, known, tokens, opening=opening, tenant=state.tenant)

    def open(self, states: Iterable[RequestState]) -> None:
        """Sends prompts, in the background."""
        self._post([self._entry(state) for state in states])

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            sent = self._sent.get(outcome.request.session)
            if sent is not None and len(outcome.tree):
                sent.refused = outcome.refused

    def taken_back(self, states: Iterable[RequestState]) -> None:
        """Their last step did not happen. Its tokens were not sent: a step begins with tokens that are confirmed. Where more was
        taken back, the session ends, its output withheld, because it is said again, and the next entry begins another."""
        known = [self._sent[state.session] for state in states if state.session in self._sent]
        for sent in known:
            sent.refused = None
        anew = [sent.state for sent in known if sent.tokens > sent.state.settled]
        self._end([Entry(state.session, closing=True, tenant=state.tenant, withheld=True) for state in anew])

    def has_news(self, states: Iterable[RequestState]) -> bool:
        """Whether the next entries tell more than tokens: that a draft was verified, or that a request is here."""
        sent = [self._sent.get(state.session) for state in states if not state.ended]
        return any(of is None or of.refused is not None for of in sent)

    def step(self, states: Sequence[RequestState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """One message for the whole batch: what is new of each request, and how large a tree it asks for."""
        return [tree for tree, _ in self.ask(states, budgets, [()] * len(states))]

    def ask(
        self,
        states: Sequence[RequestState],
        budgets: Sequence[Budget],
        queries: Sequence[tuple[Query, ...]],
    ) -> list[tuple[DraftTree, tuple[DraftTree, ...]]]:
        """The tree of each request as `step` gets it, and the trees of its queries. There are none if the datastore has not the text."""
        running = [row for row, state in enumerate(states) if not state.ended]
        entries = [self._asking(states[row], budgets[row], queries[row]) for row in running]
        clock = PhaseClock()
        replies = self.datastore.step(entries, self._deadline) if entries else []
        clock.end(RETRIEVE)
        answers: list[tuple[DraftTree, tuple[DraftTree, ...]]] = [(EMPTY_TREE, ())] * len(states)
        for row, reply in zip(running, replies, strict=True):
            answers[row] = reply.tree, reply.trees
        return answers

    def close(self, states: Iterable[RequestState]) -> None:
        """Sends what is not sent yet, and that the sessions end."""
        self._end([self._closing(state) for state in states])

    def drop(self, states: Iterable[RequestState]) -> None:
        """Ends the sessions as they are."""
        self._end([Entry(state.session, closing=True, tenant=state.tenant) for state in states])

    def _entry(self, state: RequestState) -> Entry:
        """What is new of the request."""
        sent = self._sent.get(state.session)
        opening = state.opening if sent is None else None
        if sent is None:
            sent = self._sent[state.session] = _Sent(state)
        start = min(sent.tokens, state.text.length)  # a text may end before what was sent
        sent.tokens = state.text.length
        return Entry(state.session, start, state.text.after(start), opening=opening, tenant=state.tenant)

    def _asking(self, state: RequestState, budget: Budget, queries: tuple[Query, ...]) -> Entry:
        entry = self._entry(state)
        sent = self._sent[state.session]
        if sent.refused and self.datastore.wants_rejected:
            entry.rejected = sent.refused
        sent.refused = None
        entry.expected = state.expected if entry.opening is not None else 0
        if state.takes_from(DraftSource.DATASTORE):
            entry.budget, entry.queries = budget, queries
        return entry

    def _closing(self, state: RequestState) -> Entry:
        entry = self._entry(state)
        entry.closing, entry.opening = True, None
        return entry

    def _post(self, entries: list[Entry]) -> None:
        if entries:
            self.datastore.post(entries)

    def _end(self, entries: list[Entry]) -> None:
        """Sends the last entries of sessions."""
        self._post(entries)
        for entry in entries:
            self._sent.pop(entry.session, None)


class DatastoreFallback(Fallback):
    """The datastore drafts for every request: it costs little, and may know what a draft model does not. budget: of each tree."""

    def __init__(self, feed: DatastoreFeed, budget: Budget) -> None:
        self._feed = feed
        self._budget = budget

    def parts(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[list[Part]]:
        return [[Part(tree)] for tree in self._feed.step(states, [self._budget] * len(states))]
