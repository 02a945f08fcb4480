"""The value types that cross the engine's boundary: what a decode step sends, and what it gets back.

The embedded client, the gRPC client and the server use the same types. The messages of
``protos/specstore/v1/drafting.proto`` carry exactly these fields.

An object is never changed after its construction. The types of which each step makes dozens are not frozen nevertheless:
that would make the construction two thirds slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree

MAX_VOCAB = 1 << 31  # token ids are smaller
EMPTY_TOKENS = np.empty(0, dtype=np.int32)
MAX_NODES, MAX_DEPTH = 256, 64  # of a Budget
MAX_PRIORS = 8  # that a session names


class Status(IntEnum):
    """The result of one entry."""

    OK = 1
    UNKNOWN_SESSION = 2  # resend the whole text with `opening` set
    GAP = 3  # `start` lies beyond what is known: resend from `Reply.known`
    OVER_BUDGET = 4  # a limit refused the entry, or the disk refused a closing entry's output


@dataclass(frozen=True, slots=True)
class Namespace:
    """A set of texts. Text of one namespace is never proposed in another."""

    model: str
    tokenizer: str  # fingerprint, see datastore_service.storage
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one draft tree. The root, which is the last accepted token, is not counted.

    nodes: drafted tokens in all, 0 for no draft. depth: longest path. children: most children of a node, 1 for a chain. By
    default only `nodes` bounds the tree.
    """

    nodes: int
    depth: int = MAX_DEPTH
    children: int = MAX_NODES


NO_DRAFT = Budget(nodes=0)


@dataclass(frozen=True, slots=True)
class Opening:
    """Present in the first entry of a session.

    conversation: name under which the session's text is kept for the next request; "" keeps nothing.
    publish: whether the session's output may enter the live tier when it closes.
    prompt_length: number of leading tokens that are the prompt; the rest is output.
    handing_over: another stream continues the session, and this one does not hold it.
    priors: names of further priors that the session's drafts come from, at most MAX_PRIORS. Those that its tenant may not read are as
    those that there are not: left out.
    workspace: the text of a project, which the session searches, and to which its own text is added when it closes, the prompt too; ""
    for none.
    group: the sessions that answer the same prompt, which draft for each other while they are open; "" for none.
    user: whose text the session is, so that it can be forgotten; "" says nothing.
    epoch: how often the model's weights had changed when the session began; 0 says nothing.
    """

    conversation: str = ""
    publish: bool = True
    prompt_length: int = 0
    handing_over: bool = False
    priors: tuple[str, ...] = ()
    workspace: str = ""
    user: str = ""
    group: str = ""
    epoch: int = 0


@dataclass(slots=True, eq=False)
class Rejected:
    """Drafted tokens that the target refused.

    position: number of the session's tokens before them.
    tokens: int32, the refused siblings at that position.
    """

    position: int
    tokens: np.ndarray


@dataclass(slots=True, eq=False)
class Query:
    """Asks what would follow if these tokens, which are not committed, came after the entry's text. Nothing of it is kept.

    tokens: int32, empty for the entry's text alone.
    """

    tokens: np.ndarray
    budget: Budget


SessionName = str  # one running request's, as the worker, the datastore and the draft side name it


@dataclass(slots=True, eq=False)
class Entry:
    """One session's part of a step. The entry's text is the session's up to `start`, followed by `tokens`.

    start: number of the session's tokens before `tokens`. It makes a message idempotent: the datastore skips tokens that
    it has already, and reports a GAP if it lacks some.
    tokens: int32, accepted since the last message.
    expected: leading tokens that a service has already from another instance, which began the session. They are sent only
    if it turns out to lack them.
    queries: each continues the entry's text. Another stream may have sent more of the session already: a query that agrees
    with that text is still answered, the tree of any other is empty.
    withheld: the session's output is not published, and from here on no workspace and no group gets its text.
    tenant: whose session it is, named by each of its entries; "" where the datastore has one tenant.

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
    tenant: str = ""
    withheld: bool = False

    def end_of_session(self) -> Entry:
        """The entry that ends this one's session where it is no longer needed: it goes on, and is published, elsewhere."""
        return Entry(self.session, closing=True, tenant=self.tenant, withheld=True)


@dataclass(slots=True, eq=False)
class Reply:
    """Answer to one Entry. known: number of the session's tokens that the datastore has now (0 if it is unknown); `tree`
    continues them. trees: one for each query of the entry; they are empty unless the status is OK. refusal: the field and the limit
    that the entry, or the output that it ends with, is beyond; the status is OVER_BUDGET then."""

    status: Status
    known: int
    tree: DraftTree
    trees: tuple[DraftTree, ...] = ()
    refusal: str = ""


def step_without_refused(
    entries: Sequence[Entry | str], step: Callable[[Sequence[Entry]], list[Reply]]
) -> list[Reply]:
    """One Reply for each entry, in the same order. entries: with the refusal in place of an entry that is not stepped."""
    replies = iter(step([entry for entry in entries if isinstance(entry, Entry)]))
    return [
        next(replies) if isinstance(entry, Entry) else Reply(Status.OVER_BUDGET, 0, EMPTY_TREE, refusal=entry)
        for entry in entries
    ]
