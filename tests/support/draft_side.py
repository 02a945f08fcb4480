"""A draft side in the worker's own process, with a model that is a function of the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import DraftModel, Row
from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.exchange.messages import Answer, Message
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts

COUNT = 32  # candidates of a node
Function = Callable[
    [list[list[int]]], np.ndarray
]  # texts -> the next token's distribution, float32 [texts, vocabulary]


class FunctionModel(DraftModel):
    """Without KV: every text is ready. runs: rows that were run."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.runs = 0

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        self.runs += len(rows)
        return [_likeliest(of) for of in self.function([text_of(*row) for row in rows])]


def text_of(draft: Draft, node: int) -> list[int]:
    """Of the tokens down to a node."""
    path = [draft.trie.token(at) for at in draft.trie.path(node)]
    return draft.text.after(0).tolist() + path


def commit(draft: Draft, tokens: Sequence[int], epoch: int) -> list[int]:
    """Has a draft go on by committed tokens; the nodes that carried them."""
    path = draft.trie.follow(list(tokens))
    assert draft.commit(path, np.array(tokens, np.int32), epoch)
    return path


def _likeliest(distribution: np.ndarray) -> Candidates:
    tokens = np.argsort(-distribution, kind="stable")[:COUNT].astype(np.int32)
    return Candidates(tokens, distribution[tokens].astype(np.float32))


def saguaro_parts(lookahead: int = 4) -> DraftParts:
    return DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(lookahead)))


class InProcessDraftSide(DraftChannel):
    """Drafts when its answers are collected. rounds: of work, a collection. parts: makes what it drafts with, SAGUARO's unless it is
    given."""

    def __init__(
        self,
        function: Function,
        rounds: int = 8,
        rows: int = 8,
        outcomes: int = 8,
        parts: Callable[[], DraftParts] = saguaro_parts,
    ) -> None:
        self._function, self._rounds = function, rounds
        self._shape = rows, outcomes
        self._parts = parts
        self.seen: list[Message] = []
        self._answers: list[Answer] = []
        self.forget()

    def post(self, messages: Sequence[Message]) -> None:
        self.seen += messages
        self._answers += self._side.hear(messages)

    def collect(self, seconds: float) -> list[Answer]:
        for _ in range(self._rounds):
            answers = self._side.work()
            if answers is None:
                break
            self._answers += answers
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """There is no process to end."""

    def new_model(self) -> DraftModel:
        return FunctionModel(self._function)

    def forget(self) -> None:
        """As after a restart."""
        self._side = DraftSide(self.new_model(), self._parts(), *self._shape)


def follow_pairs(texts: list[list[int]]) -> np.ndarray:
    """A small draft model: what has followed the last token in the text so far."""
    found = np.full((len(texts), 1 + max(map(max, texts))), 1e-3, np.float32)
    for row, text in enumerate(texts):
        followers = [after for token, after in zip(text, text[1:], strict=False) if token == text[-1]]
        np.add.at(found[row], followers, 1.0)
    return found / found.sum(axis=1, keepdims=True)
