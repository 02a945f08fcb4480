"""The value types that cross the engine's boundary: what a decode step sends and what it gets back.

The same types serve the embedded client, the gRPC client and the server; the wire
messages of ``protos/specstore/v1/drafting.proto`` carry exactly these fields.

None of them is changed once made. Those that are made by the dozen in each step are not frozen all the same: that would
cost two thirds more time to make one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from datastore_service.protocol.tree import DraftTree

EMPTY_TOKENS = np.empty(0, dtype=np.int32)
MAX_NODES, MAX_DEPTH = 256, 64  # of a Budget


class Status(IntEnum):
    """What became of one entry."""

    OK = 1
    UNKNOWN_SESSION = 2  # resend the whole text with `opening` set
    GAP = 3  # `start` lies beyond what is known: resend from `Reply.known`
    OVER_BUDGET = 4  # a bound on sessions or bytes refused the entry, or the disk a closing one's output


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose text may be proposed to whom: nothing crosses from one namespace to another."""

    model: str
    tokenizer: str  # fingerprint, see datastore_service.storage
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one draft tree, the root (the last accepted token) not counted.

    nodes: drafted tokens in all, 0 asks for no draft. depth: longest path. children: most children of a node, 1 for a
    chain. What is not given bounds nothing that `nodes` does not.
    """

    nodes: int
    depth: int = MAX_DEPTH
    children: int = MAX_NODES


NO_DRAFT = Budget(nodes=0)


@dataclass(frozen=True, slots=True)
class Opening:
    """Present in the first entry of a session.

    conversation: name under which the session's text outlives the request and is found again ("" = it does not).
    publish: whether the session's output may enter the live tier when it closes.
    prompt_length: how many leading tokens are the prompt, the rest is output.
    handing_over: another stream goes on with the session, this one does not hold it.
    """

    conversation: str = ""
    publish: bool = True
    prompt_length: int = 0
    handing_over: bool = False


@dataclass(slots=True, eq=False)
class Rejected:
    """Drafted tokens which the target refused.

    position: number of session tokens that precede them (the context they were refused in).
    tokens: int32, the refused siblings, all at that position.
    """

    position: int
    tokens: np.ndarray


@dataclass(slots=True, eq=False)
class Query:
    """What would follow an entry's text if these tokens, which are not committed, came next. Nothing of it is kept.

    tokens: int32, empty for the entry's text alone.
    """

    tokens: np.ndarray
    budget: Budget


@dataclass(slots=True, eq=False)
class Entry:
    """One session's part of a step. The entry's text is the session's up to `start` and then `tokens`.

    start: number of the session's tokens that precede `tokens`. It makes a message idempotent: what the datastore
    already has is skipped, what it lacks is reported as a GAP.
    tokens: int32, accepted since the last message.
    expected: leading tokens that a service has from another instance, which began the session. They do not travel, unless
    it turns out to lack them.
    queries: each follows the entry's text. Where another stream has told more of the session already, a query that the
    text has gone on with is answered all the same; the tree of one that it has left behind is empty.

    Processing order: opening, tokens, rejected, draft, queries, closing.
    """

    session: str
    start: int = 0
    tokens: np.ndarray = field(default_factory=lambda: EMPTY_TOKENS)
    rejected: tuple[Rejected, ...] = ()
    budget: Budget = NO_DRAFT
    opening: Opening | None = None
    closing: bool = False
    expected: int = 0
    queries: tuple[Query, ...] = ()


@dataclass(slots=True, eq=False)
class Reply:
    """Answer to one Entry. known: tokens the datastore now holds of the session (0 if unknown), which `tree` follows.
    trees: one a query of the entry; empty ones unless the status is OK."""

    status: Status
    known: int
    tree: DraftTree
    trees: tuple[DraftTree, ...] = ()
