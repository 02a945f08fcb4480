"""The draft side: it follows the target's sessions, guesses how their verifications end, and drafts from there.

Its work comes in rounds, so that messages are heard between any two forwards of the draft model.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Iterable, Sequence

import numpy as np
from prometheus_client import Counter

from sglang_patches.drafting.cache import ROOT, Trie
from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.drafter import Drafter, Grown
from sglang_patches.drafting.messages import (
    Answer,
    Closed,
    Committed,
    Growth,
    Hints,
    Lost,
    Message,
    Opened,
    Verifying,
)
from sglang_patches.drafting.model import DraftModel, Row
from sglang_patches.drafting.predictor import OutcomePredictor
from sglang_patches.drafting.text import Text

STALE = Counter(
    "specstore_draft_stale_messages",
    "Verifications that came after their epoch, for another root, or with other numbers",
)
GUESSES = Counter(
    "specstore_draft_guesses", "Outcomes that were drafted for, by their accepted tokens", ["accepted"]
)


class DraftSide:
    """rows: of a draft forward over all sessions. outcomes: that are guessed for a verification, over all sessions."""

    def __init__(
        self, model: DraftModel, predictor: OutcomePredictor, drafter: Drafter, rows: int, outcomes: int
    ) -> None:
        self._model, self._predictor, self._drafter = model, predictor, drafter
        self._rows, self._outcomes = rows, outcomes
        self._drafts: dict[str, Draft] = {}

    def hear(self, messages: Iterable[Message]) -> list[Answer]:
        """Applies what happened, in order."""
        answers: list[Answer] = []
        for message in messages:
            if isinstance(message, Opened):
                self._open(message)
            elif message.session not in self._drafts:
                if not isinstance(message, Closed):
                    answers.append(Lost(message.session))
            elif isinstance(message, Closed):
                self._close(message.session)
            elif isinstance(message, Committed):
                answers += self._commit(message)
            else:
                self._verify(message)
        return answers

    def work(self) -> list[Answer] | None:
        """One round: guesses, and one forward. None when there is nothing to do."""
        answers = self._guess()
        wanted = [draft for draft in self._drafts.values() if draft.wanted]
        rows = self._plan([draft for draft in wanted if self._model.ready(draft)])
        if rows:
            answers += self._forward(rows)
        prefilled = self._model.prefill(wanted)
        return answers if answers or rows or prefilled else None

    @property
    def waits_for_room(self) -> bool:
        """Whether a session that is drafted for has no place in the model's KV cache yet."""
        return any(draft.wanted and not self._model.ready(draft) for draft in self._drafts.values())

    def _open(self, message: Opened) -> None:
        self._close(message.session)
        trie = Trie(len(message.tokens))
        trie.begin_epoch(message.epoch)
        self._drafts[message.session] = Draft(message.session, Text(message.tokens), message.sampling, trie)

    def _close(self, session: str) -> None:
        draft = self._drafts.pop(session, None)
        if draft is not None:
            self._model.close(draft)

    def _commit(self, message: Committed) -> list[Answer]:
        draft = self._drafts[message.session]
        known = draft.trie.length - message.start
        tokens = message.tokens[max(0, known) :]
        if known >= 0 and not len(tokens):  # a replay
            return []
        path, begun = None, draft.trie.epoch != message.epoch
        if known >= 0:
            self._predictor.learn(draft, draft.trie.follow(tokens.tolist()), tokens.tolist())
            path = draft.commit(tokens, message.epoch)
        if path is None:
            self._close(message.session)
            return [Lost(message.session)]
        self._model.commit(draft, draft.text.length - len(tokens), path)
        # The worker had not heard of the nodes when it began the epoch.
        return [growth_of(draft, _below(draft.trie))] if begun and len(draft.trie) else []

    def _verify(self, message: Verifying) -> None:
        """Of another epoch, of another root because a message was lost, or with other numbers because the session was opened twice, the
        verification is stale."""
        draft = self._drafts[message.session]
        trie, nodes = draft.trie, [draft.trie.root]
        rows = zip(message.nodes.tolist(), message.parents.tolist(), message.tokens.tolist(), strict=True)
        for node, parent, token in rows:
            known = message.epoch == trie.epoch and trie.resolve(parent) in nodes
            if not (known and trie.is_free(node, parent, token)):
                STALE.inc()
                return
            nodes.append(trie.add(node, parent, token, 1.0))
        if message.epoch == trie.epoch:
            draft.verify(nodes[1:], _hints(trie, nodes, message.hints))

    def _guess(self) -> list[Answer]:
        """Of the sessions whose verification's ends are all known."""
        asked = [draft for draft in self._drafts.values() if draft.verifying is not None and draft.wanted]
        answers: list[Answer] = []
        for draft in asked:
            if not draft.starts and not draft.missing():
                guesses = self._predictor.guesses(draft, max(1, self._outcomes // len(asked)))
                nodes = self._add(draft, [Grown(*guess) for guess in guesses])
                _count_guesses(draft, nodes)
                draft.starts = {node: guess.probability for node, guess in zip(nodes, guesses, strict=True)}
                if nodes:
                    answers.append(growth_of(draft, nodes))
        return answers

    def _plan(self, drafts: Sequence[Draft]) -> list[Row]:
        """The most valuable leaves of all sessions."""
        leaves = [
            (leaf.value, at, leaf.node)
            for at, draft in enumerate(drafts)
            for leaf in self._drafter.leaves(draft)
        ]
        return [Row(drafts[at], node) for _, at, node in heapq.nlargest(self._rows, leaves)]

    def _forward(self, rows: Sequence[Row]) -> list[Answer]:
        grown: dict[Draft, list[int]] = {}
        for (draft, node), candidates in zip(rows, self._model.forward(rows), strict=True):
            if candidates is not None:
                draft.candidates[node] = candidates
                if node not in (draft.verifying or ()):
                    new = self._add(draft, self._drafter.grow(node, candidates))
                    grown.setdefault(draft, []).extend(new)
        return [growth_of(draft, nodes) for draft, nodes in grown.items() if nodes]

    @staticmethod
    def _add(draft: Draft, grown: Iterable[Grown]) -> list[int]:
        trie = draft.trie
        return [trie.add(trie.next_node, *new) for new in grown]


def _count_guesses(draft: Draft, nodes: Iterable[int]) -> None:
    """nodes: what the target says after the accepted ones."""
    for accepted, guesses in collections.Counter(len(draft.trie.path(node)) - 1 for node in nodes).items():
        GUESSES.labels(accepted).inc(guesses)


def growth_of(draft: Draft, nodes: Sequence[int]) -> Growth:
    """nodes: a parent before its children."""
    trie = draft.trie
    trie.turn += 1
    return Growth(
        draft.session,
        trie.epoch,
        trie.turn - 1,
        np.array(nodes, np.int64),
        np.array([trie.parent(node) for node in nodes], np.int64),
        np.array([trie.token(node) for node in nodes], np.int32),
        np.array([trie.probability(node) for node in nodes], np.float32),
    )


def _hints(trie: Trie, nodes: Sequence[int], hints: Hints) -> dict[int, dict[int, float]]:
    """Those at these nodes, by node and token."""
    found: dict[int, dict[int, float]] = {}
    arrays = hints.parents.tolist(), hints.tokens.tolist(), hints.probabilities.tolist()
    for parent, token, probability in zip(*arrays, strict=True):
        if (node := trie.resolve(parent)) in nodes:
            found.setdefault(node, {})[token] = probability
    return found


def _below(trie: Trie) -> list[int]:
    """All nodes below the root, a parent before its children."""
    nodes = [ROOT]
    for node in nodes:
        nodes += [child for child, _, _ in trie.children(node)]
    return nodes[1:]
