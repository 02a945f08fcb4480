"""The worker's end of the draft side: what it is told, and the cache that its growth fills.

A look-up is local. It answers at once even if the draft side has just died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from prometheus_client import Counter

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from sglang_patches.drafting.cache import SpeculationCache
from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.fallback import Patience
from sglang_patches.drafting.hints import hints_of
from sglang_patches.drafting.messages import Closed, Committed, Growth, Opened, Sampling, Verifying
from sglang_patches.drafting.outcome import Outcome
from sglang_patches.drafting.requests import RequestState
from sglang_patches.drafting.source import DRAFT_MODEL

LOOKUPS = Counter("specstore_speculation_lookups", "Look-ups in the speculation cache", ["result"])
_HIT, _WAITED, _MISS = map(LOOKUPS.labels, ("hit", "waited", "miss"))


class Speculation:
    """nodes: most of a tree. sampling_of: how the target draws a request's tokens. now: seconds by a steady clock."""

    def __init__(
        self,
        channel: DraftChannel,
        nodes: int,
        sampling_of: Callable[[RequestState], Sampling],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel, self._now = channel, now
        self._nodes = nodes
        self._sampling_of = sampling_of
        self._cache = SpeculationCache()
        self._states: dict[str, RequestState] = {}
        # Node numbers of the trees that were handed out for this step.
        self._shown: dict[RequestState, np.ndarray] = {}
        self._proposed: dict[RequestState, DraftTree] = {}  # the datastore's trees of this step

    def open(self, states: Iterable[RequestState]) -> None:
        """Begins with the requests' texts as far as their outcome is known."""
        self._channel.post(
            [self._opened(state) for state in states if not (state.plain_reason or state.ended)]
        )

    def outcomes_known(self, outcomes: Iterable[Outcome]) -> None:
        self._take(0.0)  # what the outcomes' epochs still have to come
        messages = []
        for outcome in outcomes:
            session = outcome.request.session
            if session in self._cache:
                self._cache.advance(session, outcome.start, outcome.tokens)
                epoch = self._cache.trie(session).epoch
                messages.append(Committed(session, outcome.start, outcome.tokens, epoch))
        self._channel.post(messages)

    def look_up(
        self,
        states: Sequence[RequestState],
        depths: Sequence[int],
        patience: Callable[[int, int], Patience],
    ) -> list[DraftTree]:
        """A tree for each request, empty where the outcome was not foreseen. depths: most levels of its tree. patience: how long
        to wait for the missing trees, given the numbers of requests and of missing trees."""
        self.open([state for state in states if state.session not in self._cache])
        self._take(0.0)
        trees = self._trees(states, depths)
        missing = [row for row, depth in enumerate(depths) if self._missing(states[row], trees[row], depth)]
        seconds, nodes = patience(len(states), len(missing))
        until = self._now() + seconds
        while any(len(trees[row]) < min(nodes, depths[row]) for row in missing):
            if (wait := until - self._now()) <= 0 or not self._take(wait):
                break
            trees = self._trees(states, depths)
        for row, tree in enumerate(trees):
            (_MISS if not len(tree) else _WAITED if row in missing else _HIT).inc()
        return trees

    def proposed(self, states: Sequence[RequestState], trees: Sequence[DraftTree]) -> None:
        """The datastore's trees of this step, whichever trees will be verified: what they have beside those is guessed as well."""
        self._proposed = dict(zip(states, trees, strict=True))

    def verification_launched(self, states: Iterable[RequestState]) -> None:
        """Tells the draft side which trees are verified, and puts those that came from elsewhere into the cache."""
        shown, self._shown = self._shown, {}
        proposed, self._proposed = self._proposed, {}
        self._channel.post(
            [
                self._verifying(state, shown[state], proposed.get(state, EMPTY_TREE))
                for state in states
                if state in shown and state.session in self._cache
            ]
        )

    def _verifying(self, state: RequestState, numbers: np.ndarray, proposed: DraftTree) -> Verifying:
        """numbers: the nodes that the cache had."""
        trie, tree = self._cache.trie(state.session), state.tree
        own = len(tree) > 0 and tree.sources[0] == DRAFT_MODEL
        parents = np.empty(len(tree), np.int64)
        nodes = numbers[: len(tree)] if own else np.empty(len(tree), np.int64)
        for at, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
            parents[at] = trie.root if parent < 0 else nodes[parent]
            if not own:
                nodes[at] = trie.graft(int(parents[at]), token, float(tree.probs[at]))
        hints = hints_of(proposed, tree, trie.root, nodes)
        return Verifying(state.session, trie.epoch, nodes, parents, tree.tokens, hints)

    def taken_back(self, states: Iterable[RequestState]) -> None:
        """Their last step did not happen: they begin again."""
        self.open(states)

    def close(self, states: Iterable[RequestState]) -> None:
        for state in states:
            self._cache.close(state.session)
            self._states.pop(state.session, None)
            self._shown.pop(state, None)
            self._proposed.pop(state, None)
        self._channel.post([Closed(state.session) for state in states])

    drop = close

    def _opened(self, state: RequestState) -> Opened:
        trie = self._cache.open(state.session, state.settled)
        self._states[state.session] = state
        return Opened(
            state.session, state.text.between(0, state.settled), trie.epoch, self._sampling_of(state)
        )

    def _take(self, seconds: float) -> bool:
        """Whether anything came."""
        lost = []
        answers = self._channel.collect(seconds)
        for answer in answers:
            whole = isinstance(answer, Growth) and self._cache.grow(answer)
            if not whole and answer.session in self._states:
                lost.append(self._states[answer.session])
        self.open(lost)
        return bool(answers)

    def _trees(self, states: Sequence[RequestState], depths: Sequence[int]) -> list[DraftTree]:
        return [self._tree(state, depth) for state, depth in zip(states, depths, strict=True)]

    def _missing(self, state: RequestState, tree: DraftTree, depth: int) -> bool:
        """Whether the draft side may still send a tree."""
        return not len(tree) and depth > 0 and state.session in self._cache

    def _tree(self, state: RequestState, depth: int) -> DraftTree:
        if state.session not in self._cache:
            return EMPTY_TREE
        tree, self._shown[state] = self._cache.subtree(state.session, self._nodes, depth, DRAFT_MODEL)
        return tree
