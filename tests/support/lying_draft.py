"""A draft side that lies, over the real wire: random tokens at nodes that are there and nodes that are not, epochs that are over or yet
to come, wrong turns, other sessions, numbers given twice, arrays of different lengths. It says them as fast as they are read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from sglang_patches.exchange.connection import ParentConnection
from sglang_patches.exchange.messages import Answer, Closed, Committed, Growth, Lost, Message, Opened, Ready

BURST = 24  # answers of a frame
MOST_NODES = 6  # of a growth
FAR = 1 << 40


class Session:
    """What it knows of one: as much as makes lies plausible. nodes: numbers that it gave."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begin(0)

    def begin(self, epoch: int) -> None:
        self.epoch, self.turn, self.nodes = epoch, 0, [0]


class Liar:
    """vocabulary: of the target's tokens."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._draw = random.Random(seed)
        self._sessions: dict[str, Session] = {}
        self._next = 1

    @property
    def has_sessions(self) -> bool:
        return bool(self._sessions)

    def hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Closed):
                self._sessions.pop(message.session, None)
            elif isinstance(message, Opened):
                self._sessions[message.session] = session = Session(message.session)
                session.begin(message.epoch)
            elif isinstance(message, Committed) and message.session in self._sessions:
                session = self._sessions[message.session]
                if session.epoch != message.epoch:
                    session.begin(message.epoch)

    def lies(self) -> list[Answer]:
        """About any of the sessions."""
        session = self._draw.choice(list(self._sessions.values()))
        kinds = [self._plausible, self._of_another_epoch, self._of_no_session, self._again, self._malformed]
        kind = self._draw.choices([*kinds, self._of_another_turn, self._lost], [20, 10, 3, 3, 10, 1, 1])[0]
        answers = kind(session)
        return answers * 2 if self._draw.random() < 0.1 else answers

    def _growth(self, known: Session, **other: int | str) -> Growth:
        """Random tokens with random probabilities, some below nodes that are not there."""
        nodes, parents = [], []
        for _ in range(self._draw.randint(0, MOST_NODES)):
            parents.append(self._draw.choice([0, *known.nodes, *nodes, self._next + 1000]))
            nodes.append(self._next)
            self._next += 1
        known.nodes = [*known.nodes, *nodes][-20:]
        tokens = [self._draw.randrange(self._vocabulary) for _ in nodes]
        arrays = _arrays(nodes, parents, tokens, [self._draw.random() for _ in nodes])
        head = {"session": known.name, "epoch": known.epoch, "turn": known.turn} | other
        return Growth(*head.values(), *arrays)

    def _plausible(self, session: Session) -> list[Answer]:
        growth = self._growth(session)
        session.turn += 1
        return [growth]

    def _of_another_epoch(self, session: Session) -> list[Answer]:
        ahead = self._draw.choice([-FAR, -2, -1, 1, 2, FAR])
        return [self._growth(session, epoch=session.epoch + ahead)]

    def _of_another_turn(self, session: Session) -> list[Answer]:
        return [self._growth(session, turn=session.turn + self._draw.choice([1, 2, FAR]))]

    def _of_no_session(self, session: Session) -> list[Answer]:
        return [
            self._growth(session, session=f"another {self._draw.random()}"),
            Lost("nobody's", session.epoch),
        ]

    def _again(self, session: Session) -> list[Answer]:
        return [self._growth(session, turn=max(0, session.turn - 1))]

    def _lost(self, session: Session) -> list[Answer]:
        return [Lost(session.name, session.epoch + self._draw.choice([0, -1, FAR]))]

    def _malformed(self, session: Session) -> list[Answer]:
        """Of the right epoch and turn."""
        growth, draw = self._growth(session), self._draw
        session.turn += 1
        columns = [
            array.tolist() for array in (growth.nodes, growth.parents, growth.tokens, growth.probabilities)
        ]
        nodes, parents, tokens, chances = columns
        fault = draw.randrange(6)
        if fault == 0:  # numbers that others have, the worker's and the root's among them
            nodes[:] = [draw.choice([0, -1, -2, -FAR, *session.nodes]) for _ in nodes]
        elif fault == 1:  # one continuation under many numbers
            parents[:], tokens[:] = [0] * len(nodes), tokens[:1] * len(nodes)
        elif fault == 2:
            parents[:] = nodes[:]  # its own parent
        elif fault == 3:
            wrong = [-1, self._vocabulary, (1 << 31) - 1, -(1 << 31)]
            tokens[:] = [draw.choice(wrong) for _ in tokens]
        elif fault == 4:
            chances[:] = [draw.choice([float("nan"), -1.0, float("inf"), 2.0]) for _ in chances]
        else:
            del draw.choice(columns)[:1]
        return [Growth(growth.session, growth.epoch, growth.turn, *_arrays(*columns))]


def _arrays(nodes: list, parents: list, tokens: list, chances: list) -> list[np.ndarray]:
    kinds = np.int64, np.int64, np.int32, np.float32
    return [
        np.array(values, kind) for values, kind in zip((nodes, parents, tokens, chances), kinds, strict=True)
    ]


def run(parent: ParentConnection, vocabulary: int, seed: int) -> None:
    liar = Liar(vocabulary, seed)
    parent.send([Ready(0.0, 1)])
    while True:
        liar.hear(parent.receive(0.0 if liar.has_sessions else None))
        answers = [answer for _ in range(BURST) for answer in (liar.lies() if liar.has_sessions else ())]
        if answers:
            parent.send(answers)
