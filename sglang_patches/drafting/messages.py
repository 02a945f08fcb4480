"""What the worker and the draft side tell each other. Only token ids and estimates cross, no probabilities of the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target draws a request's tokens. top_k: at most 1 for the likeliest token alone. noise: seed of the noise that the
    target shares with its drafts, None where it draws without (`verification.shared_noise`)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    noise: int | None


GREEDY = Sampling(1.0, 1, 1.0, 0.0, None)


@dataclass(slots=True, eq=False)
class Opened:
    """A session begins, or begins again, with these tokens (int32). Node 0 of its trie is the last of them."""

    session: str
    tokens: np.ndarray
    epoch: int
    sampling: Sampling = GREEDY


@dataclass(slots=True, eq=False)
class Committed:
    """tokens: int32, emitted after the first `start` of the session. A repeated message changes nothing, by its start. epoch: of
    the trie after them."""

    session: str
    start: int
    tokens: np.ndarray
    epoch: int


@dataclass(slots=True, eq=False)
class Verifying:
    """The tree that the target verifies now. nodes, parents: int64, numbers in the session's trie, a parent before its children.
    tokens: int32. Nodes that came from elsewhere than the draft side have negative numbers, and join the trie."""

    session: str
    epoch: int
    nodes: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray


@dataclass(slots=True, eq=False)
class Closed:
    """The session ends."""

    session: str


@dataclass(slots=True, eq=False)
class Growth:
    """New nodes of a session's trie, a parent before its children.

    nodes, parents: int64, numbers of the same epoch, whose first root is 0. tokens: int32. probabilities: float32, that the
    target goes on from the parent with the token.
    """

    session: str
    epoch: int
    nodes: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    probabilities: np.ndarray


@dataclass(slots=True, eq=False)
class Lost:
    """The draft side does not have the session's text: please open it again."""

    session: str


Message = Opened | Committed | Verifying | Closed
Answer = Growth | Lost
