"""The datastore's side: what it has been told of each request, and its trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from datastore_service.client import Datastore
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import NO_DRAFT, Budget, Entry, Query, Rejected
from sglang_patches.drafting.seams import Fallback
from sglang_patches.ledger.outcome import Follower, Outcome
from sglang_patches.ledger.requests import RequestState
from sglang_patches.metrics import RETRIEVE, PhaseClock


class DatastoreFeed(Follower):
    """Tells the datastore of every request's text, each token once. deadline: seconds that a step may wait for its trees."""

    def __init__(self, datastore: Datastore, deadline: float) -> None:
        self.datastore = datastore
        self._deadline = deadline
        self._sent: dict[RequestState, int] = {}  # number of tokens
        # Of verified trees. An empty tuple is news as well: a draft was verified.
        self._refused: dict[RequestState, tuple[Rejected, ...]] = {}

    def open(self, states: Iterable[RequestState]) -> None:
        """Sends prompts, in the background."""
        entries = [
            Entry(state.session, 0, state.text.after(0), opening=state.opening, tenant=state.tenant)
            for state in states
        ]
        self._sent |= {state: len(state.text) for state in states}
        self._post(entries)

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        self._refused |= {
            outcome.request: outcome.refused for outcome in outcomes if len(outcome.tree.tokens)
        }

    def taken_back(self, states: Iterable[RequestState]) -> None:
        """Their last step did not happen. Its tokens were not sent: a step begins with tokens that are confirmed. Where more was
        taken back, the session ends, its output withheld, because it is said again, and the next entry begins another."""
        states = list(states)
        for state in states:
            self._refused.pop(state, None)
        anew = [state for state in states if self._sent.get(state, 0) > state.settled]
        for state in anew:
            del self._sent[state]
        self._post([Entry(state.session, closing=True, tenant=state.tenant, withheld=True) for state in anew])

    def has_news(self, states: Iterable[RequestState]) -> bool:
        """Whether the next entries tell more than tokens: that a draft was verified, or that a request is here."""
        return bool(self._refused) or any(state not in self._sent for state in states if not state.ended)

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
        entries = [self._entry(states[row], budgets[row], queries[row]) for row in running]
        clock = PhaseClock()
        replies = self.datastore.step(entries, self._deadline) if entries else []
        clock.end(RETRIEVE)
        answers: list[tuple[DraftTree, tuple[DraftTree, ...]]] = [(EMPTY_TREE, ())] * len(states)
        for row, reply in zip(running, replies, strict=True):
            answers[row] = reply.tree, reply.trees
        return answers

    def close(self, states: Iterable[RequestState]) -> None:
        """Sends what is not sent yet, and that the sessions end."""
        self._post([self._closing(state) for state in states])

    def drop(self, states: Iterable[RequestState]) -> None:
        """Ends the sessions as they are."""
        self._sent.clear()
        self._refused.clear()
        self._post([Entry(state.session, closing=True, tenant=state.tenant) for state in states])

    def _entry(self, state: RequestState, budget: Budget, queries: tuple[Query, ...]) -> Entry:
        sent, text = self._sent.get(state), state.text
        self._sent[state] = text.length
        refused = self._refused.pop(state, ())
        return Entry(
            state.session,
            sent or 0,
            text.after(sent or 0),
            rejected=refused if self.datastore.wants_rejected else (),
            budget=NO_DRAFT if state.plain_reason else budget,
            opening=state.opening if sent is None else None,
            expected=state.expected if sent is None else 0,
            queries=() if state.plain_reason else queries,
            tenant=state.tenant,
        )

    def _closing(self, state: RequestState) -> Entry:
        self._refused.pop(state, None)
        start = min(self._sent.pop(state, 0), len(state.text))
        return Entry(state.session, start, state.text.after(start), closing=True, tenant=state.tenant)

    def _post(self, entries: list[Entry]) -> None:
        if entries:
            self.datastore.post(entries)


class DatastoreFallback(Fallback):
    """The datastore drafts for every request: it costs little, and may know what a draft model does not. budget: of each tree."""

    def __init__(self, feed: DatastoreFeed, budget: Budget) -> None:
        self._feed = feed
        self._budget = budget

    def trees(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[DraftTree]:
        return self._feed.step(states, [self._budget] * len(states))
