"""The draft side: it follows the target's sessions, guesses how their verifications end, and drafts from there.

Its work comes in rounds, so that messages are heard between any two forwards of the draft model.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from prometheus_client import Counter

from datastore_service.protocol.types import SessionName
from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import (
    AllRows,
    Drafter,
    DraftModel,
    Grown,
    Leaf,
    OutcomePredictor,
    Retriever,
    Row,
    RowChoice,
)
from sglang_patches.exchange.messages import (
    Answer,
    Closed,
    Committed,
    Expected,
    Growth,
    Lost,
    Message,
    Opened,
    Verifying,
)
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import ROOT, Trie
from sglang_patches.ledger.rates import SpeedRatio, per_tenant

STALE = Counter(
    "specstore_draft_stale_messages",
    "Verifications of which the draft process heard too late to draft for them",
)
GUESSES = Counter(
    "specstore_draft_guesses",
    "Outcomes of verifications that were drafted for in advance, by their number of accepted tokens",
    ["accepted"],
)
PHRASES = Counter(
    "specstore_draft_phrase_tokens",
    "Tokens of the datastore that draft forwards checked (checked), and those of them that the draft model would have drafted (kept), with "
    "DOUBLE. Kept tokens per forward are the paper's AMT",
    ["result"],
)
_PROPOSED, _KEPT = map(PHRASES.labels, ("checked", "kept"))


class Phrase(NamedTuple):
    """A node that a retriever proposes. value: of running it, as of a `Leaf`. is_new: whether its trie did not have it."""

    value: float
    is_new: bool


class Learner(NamedTuple):
    """What guesses and drafts, by what it has seen come true. The drafter may use the predictor's statistics."""

    predictor: OutcomePredictor
    drafter: Drafter


class DraftParts(NamedTuple):
    """What makes a method's draft side. learner: makes that of a tenant, whose statistics no other tenant's requests see. retriever:
    proposes what the draft model checks in the drafter's forwards, None without. ratio: is told how long verifications and forwards
    take. choice: of a forward's rows."""

    learner: Callable[[], Learner]
    retriever: Retriever | None = None
    ratio: SpeedRatio | None = None
    choice: RowChoice | None = None


class DraftSide:
    """Follows the target's sessions, guesses their outcomes and drafts from there, in rounds.

    rows: of a draft forward, over all sessions.
    outcomes: number that is guessed for verifications, over all sessions.
    serial: whether it has the target's device, and drafts only while nothing is verified there (DOUBLE, D.8).
    """

    def __init__(
        self, model: DraftModel, parts: DraftParts, rows: int, outcomes: int, serial: bool = False
    ) -> None:
        self._model = model
        self._learner = per_tenant(parts.learner)
        self._retriever, self._ratio = parts.retriever, parts.ratio or SpeedRatio()
        self._choice = parts.choice or AllRows()
        self._rows, self._outcomes, self._serial = rows, outcomes, serial
        self._drafts: dict[SessionName, Draft] = {}
        self._forwards = 0

    def hear(self, messages: Iterable[Message]) -> list[Answer]:
        """Applies what happened, in order."""
        answers: list[Answer] = []
        for message in messages:
            if isinstance(message, Opened):
                self._open(message)
            elif message.session not in self._drafts:
                if not isinstance(message, Closed):
                    answers.append(Lost(message.session, message.epoch))
            elif isinstance(message, Closed):
                self._close(message.session)
            elif isinstance(message, Committed):
                answers += self._commit(message)
            elif isinstance(message, Expected):
                self._expect(message)
            else:
                self._verify(message)
        return answers

    def work(self) -> list[Answer] | None:
        """One round: guesses, and one forward. None when there is nothing to do."""
        answers = self._guess()
        wanted = [draft for draft in self._drafts.values() if draft.wanted]
        if self._serial and any(draft.verifying is not None for draft in self._drafts.values()):
            return answers or None
        rows = self._plan([draft for draft in wanted if self._model.ready(draft)])
        grown = self._forward(rows) if rows else None
        answers += grown or []
        prefilled = self._model.prefill(wanted)
        return answers if answers or grown is not None or prefilled else None

    @property
    def waits_for_room(self) -> bool:
        """Whether a session that is drafted for has no place in the model's KV cache yet."""
        wanted = (draft for draft in self._drafts.values() if draft.wanted and self._model.takes(draft))
        return any(not self._model.ready(draft) for draft in wanted)

    def _predictor(self, draft: Draft) -> OutcomePredictor:
        return self._learner(draft.tenant).predictor

    def _drafter(self, draft: Draft) -> Drafter:
        return self._learner(draft.tenant).drafter

    def _open(self, message: Opened) -> None:
        self._forget(message.session)
        trie = Trie(len(message.tokens))
        trie.begin_epoch(message.epoch)
        draft = Draft(message.session, Text(message.tokens), message.sampling, trie, tenant=message.tenant)
        draft.published_from = message.published_from
        self._drafts[message.session] = draft

    def _close(self, session: str) -> None:
        if self._retriever is not None:
            self._retriever.closed(self._drafts[session])
        self._forget(session)

    def _forget(self, session: str) -> None:
        draft = self._drafts.pop(session, None)
        if draft is not None:
            self._model.close(draft)
            if self._retriever is not None:
                self._retriever.forgotten(draft)

    def _commit(self, message: Committed) -> list[Answer]:
        draft = self._drafts[message.session]
        known = draft.trie.length - message.start
        tokens = message.tokens[max(0, known) :]
        if known >= 0 and not len(tokens):  # a replay
            return []
        begun, taken = draft.trie.epoch != message.epoch, self._model.takes(draft)
        path = draft.trie.follow(tokens.tolist())
        if known >= 0:
            self._predictor(draft).learn(draft, path, tokens.tolist())
        if known < 0 or not draft.commit(path, tokens, message.epoch):
            self._forget(message.session)
            return [Lost(message.session, message.epoch)]
        if draft.verified_at is not None:
            self._ratio.verification_took(self._ratio.now() - draft.verified_at)
            draft.verified_at = None
        self._model.commit(draft, draft.text.length - len(tokens), path)
        if taken and not self._model.takes(draft):  # opened again, it is one that no step waits for
            self._forget(message.session)
            return [Lost(message.session, message.epoch)]
        # The worker had not heard of the nodes when it began the epoch.
        return [growth_of(draft, _below(draft.trie))] if begun and len(draft.trie) else []

    def _verify(self, message: Verifying) -> None:
        """Begins a verification, unless the message is stale. It is stale if it is of another epoch, of another root because a message
        was lost, or has other numbers because the session was opened twice."""
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
            draft.verify(nodes[1:])
            draft.verified_at = self._ratio.now()

    def _expect(self, message: Expected) -> None:
        """Drops expectations that do not belong to the verification under way."""
        draft = self._drafts[message.session]
        trie = draft.trie
        known = message.epoch == trie.epoch and trie.resolve(message.root) == trie.root
        if not known or draft.verifying is None:
            STALE.inc()
            return
        nodes = [trie.resolve(node) for node in message.nodes.tolist()]
        shape = len(nodes), -1
        rows = zip(nodes, message.tokens.reshape(shape), message.probabilities.reshape(shape), strict=True)
        draft.expected = {node: Candidates(*choices) for node, *choices in rows if node in draft.verifying}

    def _guess(self) -> list[Answer]:
        """Predicts outcomes where something has become known since the last prediction."""
        asked = [draft for draft in self._drafts.values() if draft.verifying is not None and draft.wanted]
        answers: list[Answer] = []
        budget = max(1, self._outcomes // max(1, len(asked)))
        for draft in asked:
            basis = self._predictor(draft).basis(draft)
            if basis == draft.basis:
                continue
            draft.basis = basis
            guesses, draft.unknown = self._predictor(draft).predict(draft, budget)
            begun = set(draft.starts)
            nodes = self._add(draft, [Grown(*guess) for guess in guesses])
            draft.starts = {node: guess.probability for node, guess in zip(nodes, guesses, strict=True)}
            new = [node for node in nodes if node not in begun]
            if new:
                _count_guesses(draft, new)
                answers.append(growth_of(draft, new))
        return answers

    def _plan(self, drafts: Sequence[Draft]) -> list[tuple[float, Row]]:
        """The most valuable leaves of all sessions, best first. Of two that are worth the same, the one of which its session has fewer
        that are worth more, then that of the session which was run less recently."""
        leaves = [
            (-leaf.value, before, draft.last_run, at, leaf.node)
            for at, draft in enumerate(drafts)
            for before, leaf in enumerate(self._leaves(draft))
        ]
        return [
            (-worth, Row(drafts[at], node)) for worth, *_, at, node in heapq.nsmallest(self._rows, leaves)
        ]

    def _leaves(self, draft: Draft) -> list[Leaf]:
        """The session's, best first."""
        ends = (Leaf(node, value) for node, value in draft.unknown.items() if node not in draft.candidates)
        leaves = [*self._drafter(draft).leaves(draft), *ends]
        return heapq.nlargest(self._rows, leaves, key=lambda leaf: leaf.value)

    def _forward(self, leaves: Sequence[tuple[float, Row]]) -> list[Answer] | None:
        """None if there was no room."""
        phrases = self._retrieve(leaves)
        rows = self._worth_running([*leaves, *((phrase.value, row) for row, phrase in phrases.items())])
        began = self._ratio.now()
        ran = self._run(rows)
        if ran:
            seconds = self._ratio.now() - began
            self._ratio.forward_took(seconds)
            self._choice.took(len(rows), seconds)
        run = _by_draft(row for row in rows if row not in phrases)
        tentative = _by_draft(phrases)
        _PROPOSED.inc(sum(row in phrases for row in rows))
        answers: list[Answer] = []
        self._forwards += 1
        for draft in run | tentative:
            if ran:
                draft.forwards += draft in run
                draft.last_run = self._forwards
            proposed = tentative.get(draft, [])
            grown = [new for node in run.get(draft, ()) for new in self._grow(draft, node, proposed)]
            kept = set(grown)
            _KEPT.inc(len(kept.intersection(proposed)))
            self._discard(draft, [n for n in proposed if phrases[Row(draft, n)].is_new and n not in kept])
            if grown:
                answers.append(growth_of(draft, grown))
        return answers if answers or ran else None

    def _worth_running(self, rows: Sequence[tuple[float, Row]]) -> list[Row]:
        """A row is worth at least as much as those that need it, and stands before them."""
        best = sorted(rows, key=lambda row: -row[0])[: self._rows]
        count = self._choice.rows(np.array([value for value, _ in best]))
        return [row for _, row in best[:count]]

    def _run(self, rows: Sequence[Row]) -> bool:
        """Whether there was room for all of them."""
        found = self._model.forward(rows)
        for (draft, node), candidates in zip(rows, found, strict=True):
            if candidates is not None:
                draft.candidates[node] = candidates
        return None not in found

    def _retrieve(self, leaves: Sequence[tuple[float, Row]]) -> dict[Row, Phrase]:
        """Puts what the retriever proposes behind the leaves into their tries, to be checked in the leaves' forward: these nodes that
        were not run, a parent before its children."""
        values = {row: value for value, row in leaves}
        ends = _without_children(list(values))
        room = self._choice.room(self._rows, len(leaves), len(ends))
        if self._retriever is None or room < 1:
            return {}
        found: dict[Row, Phrase] = {}
        for row, tree in zip(ends, self._retriever.phrases(ends, room), strict=True):
            draft, node = row
            place: list[int] = []
            rows_of_tree = zip(tree.parents.tolist(), tree.tokens.tolist(), tree.probs.tolist(), strict=True)
            for parent, token, chance in rows_of_tree:
                above = node if parent < 0 else place[parent]
                there = draft.trie.child(above, token)
                place.append(
                    draft.trie.add(draft.trie.next_node, above, token, 0.0) if there is None else there
                )
                if place[-1] not in draft.candidates:
                    found[Row(draft, place[-1])] = Phrase(values[row] * chance, there is None)
        return found

    def _grow(self, draft: Draft, node: int, phrases: Container[int]) -> list[int]:
        """Adds what is drafted after a node that was run, and after the nodes of its phrases that are drafted so. What follows a
        verified node is the predictor's to guess, unless it was run already."""
        verified = draft.verifying is not None and node in draft.verifying
        found, waiting = [], [node]
        while waiting:
            at = waiting.pop()
            if at not in draft.candidates or draft.finishes(at):
                continue
            for grown in self._drafter(draft).grow(at, draft.candidates[at]):
                there = draft.trie.child(at, grown.token)
                if there is not None and there in phrases:
                    draft.trie.weigh(there, grown.probability)
                    waiting.append(there)
                elif verified and at == node:
                    continue
                found += self._add(draft, [grown])
        return found

    def _discard(self, draft: Draft, nodes: Sequence[int]) -> None:
        if not nodes:
            return
        draft.trie.remove(reversed(nodes))
        for node in nodes:
            draft.candidates.pop(node, None)
        self._model.discard(draft, nodes)

    @staticmethod
    def _add(draft: Draft, grown: Iterable[Grown]) -> list[int]:
        trie = draft.trie
        return [trie.add(trie.next_node, *new) for new in grown]


def _by_draft(rows: Iterable[Row]) -> dict[Draft, list[int]]:
    """The rows' nodes."""
    nodes: dict[Draft, list[int]] = {}
    for draft, node in rows:
        nodes.setdefault(draft, []).append(node)
    return nodes


def _without_children(rows: Sequence[Row]) -> list[Row]:
    """The rows that are no other row's parent, and that another token may follow."""
    parents = {(draft, draft.trie.parent(node)) for draft, node in rows if node != draft.trie.root}
    return [row for row in rows if row not in parents and not row.draft.finishes(row.node)]


def _count_guesses(draft: Draft, nodes: Iterable[int]) -> None:
    """Counts guessed outcomes by their accepted tokens.

    nodes: what the target says after the accepted ones.
    """
    for accepted, guesses in collections.Counter(len(draft.trie.path(node)) - 1 for node in nodes).items():
        GUESSES.labels(accepted).inc(guesses)


def growth_of(draft: Draft, nodes: Sequence[int]) -> Growth:
    """The message that tells of new nodes; it is counted as the trie's next turn.

    nodes: a parent before its children.
    """
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


def _below(trie: Trie) -> list[int]:
    """All nodes below the root, a parent before its children."""
    nodes = [ROOT]
    for node in nodes:
        nodes += [child for child, _, _ in trie.children(node)]
    return nodes[1:]
