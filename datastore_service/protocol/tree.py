"""The draft tree as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Tier(IntEnum):
    """The source of a drafted token."""

    PRIOR = 1
    LIVE = 2
    SESSION = 3
    REJECTED = 4


OTHER_TIER = 15  # of a service of a later version; stands for a source that is no Tier


def tier_name(source: int) -> str:
    """The name of a DraftTree's source, as answers and metrics show it."""
    return "other" if source == OTHER_TIER else Tier(source).name.lower()


@dataclass(slots=True, eq=False)  # not frozen: see datastore_service.protocol.types
class DraftTree:
    """Candidate continuations of a context, to be verified in one target forward, best first.

    The root is the context's last token and is not stored. Each array has one element for each node, in topological
    order.

    tokens: int32. parents: int32, index of the parent node, -1 for a child of the root; always smaller than the
    node's own index. probs: float32, estimated probability that the target accepts the path up to the node, never
    larger than the parent's. sources: uint8, a Tier or OTHER_TIER.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probs: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> DraftTree:
        """The first `nodes` nodes. They are the likeliest, because a drafter lists its nodes best first."""
        if len(self) <= nodes:
            return self
        return DraftTree(self.tokens[:nodes], self.parents[:nodes], self.probs[:nodes], self.sources[:nodes])

    def depths(self) -> np.ndarray:
        """int32, the depth of each node: 1 for a child of the root."""
        depths = np.zeros(len(self), dtype=np.int32)
        for node, parent in enumerate(self.parents):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
        return depths

    def no_deeper(self, depth: int) -> DraftTree:
        """The nodes down to this depth; the root's children have depth 1."""
        if len(self) <= depth:
            return self
        kept = self.depths() <= depth
        place = np.cumsum(kept, dtype=np.int32) - 1
        parents = np.where(self.parents < 0, -1, place[self.parents])[kept]
        return DraftTree(self.tokens[kept], parents, self.probs[kept], self.sources[kept])

    def check_integrity(
        self, nodes: int | None = None, depth: int | None = None, children: int | None = None
    ) -> None:
        """Raises ValueError naming the first invariant that does not hold. The arguments are the limits of a Budget."""
        size = len(self)
        for name in ("parents", "probs", "sources"):
            if len(getattr(self, name)) != size:
                raise ValueError(f"{name}: {len(getattr(self, name))} elements for {size} tokens")
        if nodes is not None and size > nodes:
            raise ValueError(f"tokens: {size} nodes exceed the budget of {nodes}")
        if size == 0:
            return
        if (self.tokens < 0).any():
            raise ValueError("tokens: negative token id")
        if (self.parents < -1).any() or (self.parents >= np.arange(size)).any():
            raise ValueError("parents: not in topological order")
        if len(set(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))) != size:
            raise ValueError("tokens: siblings with the same token")
        if not (
            np.isfinite(self.probs).all() and (self.probs >= 0).all() and (self.probs <= 1.0 + 1e-5).all()
        ):
            raise ValueError("probs: outside [0, 1]")
        inner = self.parents >= 0
        if (self.probs[inner] > self.probs[self.parents[inner]] + 1e-5).any():
            raise ValueError("probs: a child is likelier than its parent")
        if depth is not None and int(self.depths().max()) > depth:
            raise ValueError(f"parents: deeper than the budget of {depth}")
        if children is not None and int(np.unique(self.parents, return_counts=True)[1].max()) > children:
            raise ValueError(f"parents: a node has more than {children} children")


EMPTY_TREE = DraftTree(
    np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8)
)
