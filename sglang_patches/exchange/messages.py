"""What the worker and the draft side tell each other. Only token ids and estimates cross, no probabilities of the target.

`wire.py` makes bytes of them. Arrays that came over a wire are read-only.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the target draws a request's tokens. top_k: at most 1 for the likeliest token alone. noise: seed of the noise that the
    target shares with its drafts, None where it draws without (`verification.shared_noise`). ends: tokens that end the request."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    noise: int | None
    ends: frozenset[int] = frozenset()


GREEDY = Sampling(1.0, 1, 1.0, 0.0, None)


class Opened(msgspec.Struct, eq=False, array_like=True, tag=True):
    """A session begins, or begins again, with these tokens (int32). Node 0 of its trie is the last of them. published_from: the first
    of them that others may read once the request has ended, None if none may. tenant: that the request named."""

    session: str
    tokens: NDArray[np.int32]
    epoch: int
    sampling: Sampling = GREEDY
    published_from: int | None = None
    tenant: str = ""


class Committed(msgspec.Struct, eq=False, array_like=True, tag=True):
    """Tokens that were emitted in a session. A repeated message changes nothing, by its start. After a verification the last token is
    the target's own: no verified node has it at that place.

    tokens: int32, emitted after the first `start` of the session.
    epoch: of the trie after them.
    """

    session: str
    start: int
    tokens: NDArray[np.int32]
    epoch: int


class Verifying(msgspec.Struct, eq=False, array_like=True, tag=True):
    """The tree that the target verifies now. nodes, parents: int64, numbers in the session's trie, a parent before its children.
    tokens: int32. Nodes that came from elsewhere than the draft side have negative numbers, and join the trie."""

    session: str
    epoch: int
    nodes: NDArray[np.int64]
    parents: NDArray[np.int64]
    tokens: NDArray[np.int32]


class Expected(msgspec.Struct, eq=False, array_like=True, tag=True):
    """What an early exit of the target expects at the tree that it verifies, while it still does (MIRROR, equation 7).

    root: of the tree. nodes: int64 [rows], those of the root and the verified nodes that it read. tokens: int32 [rows * choices], each
    row's choices, the likeliest first. probabilities: float32 [rows * choices], the early exit's.
    """

    session: str
    epoch: int
    root: int
    nodes: NDArray[np.int64]
    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]


class Closed(msgspec.Struct, eq=False, array_like=True, tag=True):
    """The session ends."""

    session: str


class Growth(msgspec.Struct, eq=False, array_like=True, tag=True):
    """New nodes of a session's trie, a parent before its children.

    turn: how many were sent before it of the same epoch. nodes, parents: int64, numbers of the same epoch, whose first root is 0. tokens: int32. probabilities: float32, that the
    target goes on from the parent with the token.
    """

    session: str
    epoch: int
    turn: int
    nodes: NDArray[np.int64]
    parents: NDArray[np.int64]
    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]


class Lost(msgspec.Struct, eq=False, array_like=True, tag=True):
    """The draft side does not have the session's text: please open it again.

    epoch: of what it was told and could not take.
    """

    session: str
    epoch: int


class Ready(msgspec.Struct, eq=False, array_like=True, tag=True):
    """The first thing that a draft process says. seconds: it took to start. tokens: its KV slots."""

    seconds: float
    tokens: int


Message = Opened | Committed | Verifying | Expected | Closed
Answer = Growth | Lost
