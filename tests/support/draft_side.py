"""A draft side in the worker's own process, with a model that is a function: what keeps the interfaces of a draft side honest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sglang_patches.drafting.cache import SpeculationCache, Trie
from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.drafter import Drafter, Row
from sglang_patches.drafting.messages import (
    Answer,
    Closed,
    Committed,
    Growth,
    Lost,
    Message,
    Opened,
    Verifying,
)
from sglang_patches.drafting.predictor import Guess, OutcomePredictor

LEAST = 0.2  # a less likely token is not drafted: a draft that is hardly ever right keeps the fallback from being asked
Model = Callable[
    [list[list[int]]], np.ndarray
]  # texts -> the next token's distribution, float32 [texts, vocabulary]


class LikeliestEnds(OutcomePredictor):
    """At the root and each verified node, the likeliest tokens that are not drafted there."""

    def guesses(
        self, trie: Trie, verifying: np.ndarray, distributions: np.ndarray, budget: int
    ) -> list[Guess]:
        found = []
        for node, distribution in zip([trie.root, *verifying.tolist()], distributions, strict=True):
            for token in np.argsort(-distribution, kind="stable")[:2].tolist():
                if distribution[token] >= LEAST and trie.child(node, token) is None:
                    found.append(Guess(node, token, float(distribution[token])))
        return sorted(found, key=lambda guess: -guess.probability)[:budget]


class BestLeaves(Drafter):
    """Runs the likeliest nodes that have no children yet, and drafts the likeliest token after each."""

    def plan(self, tries: Mapping[str, Trie], guesses: Mapping[str, Sequence[Guess]], rows: int) -> list[Row]:
        leaves = []
        for session, trie in tries.items():
            waiting = [(1.0, trie.root)]
            while waiting:
                probability, node = waiting.pop()
                children = list(trie.children(node))
                waiting += [(probability * p, child) for child, _, p in children]
                if not children:
                    leaves.append((-probability, Row(session, node)))
        return [row for _, row in sorted(leaves)[:rows]]

    def take(self, rows: Sequence[Row], distributions: np.ndarray) -> list[Growth]:
        likeliest = distributions.argmax(axis=1)
        return [
            Growth(
                row.session,
                0,
                0,
                np.array([row.node], np.int64),
                np.array([token], np.int32),
                distributions[[at], [token]],
            )
            for at, (row, token) in enumerate(zip(rows, likeliest.tolist(), strict=True))
            if distributions[at, token] >= LEAST
        ]


class InProcessDraftSide(DraftChannel):
    """Drafts when its answers are collected. forwards: of the model, a collection."""

    def __init__(self, model: Model, forwards: int = 6, rows: int = 8) -> None:
        self._model, self._forwards, self._rows = model, forwards, rows
        self._predictor, self._drafter = LikeliestEnds(), BestLeaves()
        self._cache = SpeculationCache()
        self._texts: dict[str, list[int]] = {}
        self._verifying: dict[str, np.ndarray] = {}
        self._lost: list[str] = []
        self.seen: list[Message] = []

    def post(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.seen.append(message)
            self._apply(message)

    def collect(self, seconds: float) -> list[Answer]:
        answers: list[Answer] = [Lost(session) for session in self._lost]
        self._lost.clear()
        answers += self._guessed()
        for _ in range(self._forwards):
            tries = {session: self._cache.trie(session) for session in self._texts}
            rows = self._drafter.plan(tries, {}, self._rows)
            if rows:
                texts = [self._texts[row.session] + self._path(tries[row.session], row.node) for row in rows]
                answers += self._grown(self._drafter.take(rows, self._model(texts)))
        return answers

    def close(self) -> None:
        self._texts.clear()

    def forget(self) -> None:
        """As after a restart."""
        self._cache = SpeculationCache()
        self._texts.clear()
        self._verifying.clear()

    def _apply(self, message: Message) -> None:
        if isinstance(message, Opened):
            self._texts[message.session] = message.tokens.tolist()
            self._cache.open(message.session, len(message.tokens)).begin_epoch(message.epoch)
        elif isinstance(message, Closed):
            self._cache.close(message.session)
            self._texts.pop(message.session, None)
            self._verifying.pop(message.session, None)
        elif message.session not in self._texts:
            self._lost.append(message.session)
        elif isinstance(message, Committed):
            self._commit(message)
        elif isinstance(message, Verifying) and message.epoch == self._cache.trie(message.session).epoch:
            self._verifying[message.session] = message.nodes

    def _commit(self, message: Committed) -> None:
        text = self._texts[message.session]
        text += message.tokens[len(text) - message.start :].tolist()
        self._cache.advance(message.session, message.start, message.tokens)
        trie = self._cache.trie(message.session)
        if trie.epoch != message.epoch:
            trie.begin_epoch(message.epoch)

    def _guessed(self) -> list[Answer]:
        answers: list[Answer] = []
        for session, verifying in self._verifying.items():
            trie = self._cache.trie(session)
            nodes = np.array([node for node in verifying.tolist() if node in trie], np.int64)
            at = [trie.root, *nodes.tolist()]
            distributions = self._model([self._texts[session] + self._path(trie, node) for node in at])
            for guess in self._predictor.guesses(trie, nodes, distributions, 8):
                answers += self._grown(
                    [
                        Growth(
                            session,
                            0,
                            0,
                            np.array([guess.parent], np.int64),
                            np.array([guess.token], np.int32),
                            np.array([guess.probability], np.float32),
                        )
                    ]
                )
        self._verifying.clear()
        return answers

    def _grown(self, growths: list[Growth]) -> list[Answer]:
        for growth in growths:
            trie = self._cache.trie(growth.session)
            growth.epoch, growth.first_node = trie.epoch, trie.next_node
            self._cache.grow(growth)
        return list(growths)

    def _path(self, trie: Trie, node: int) -> list[int]:
        """Tokens from below the root down to the node."""
        waiting: list[tuple[int, list[int]]] = [(trie.root, [])]
        while waiting:
            at, path = waiting.pop()
            if at == node:
                return path
            waiting += [(child, [*path, token]) for child, token, _ in trie.children(at)]
        raise KeyError(node)
