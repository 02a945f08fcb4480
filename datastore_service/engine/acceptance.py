"""Which drafted tokens came true, by the tier that drafted them.

Every step of every session passes here, so this is written for speed: about 1 us an entry.
"""

from __future__ import annotations

import threading

import numpy as np

from datastore_service.engine.tree import DraftTree, Tier

Draft = tuple[list[int], bytes, bytes]  # a tree's tokens, parents and sources; copies, which keep no batch alive


def draft_of(tree: DraftTree) -> Draft:
    return tree.tokens.tolist(), tree.parents.tobytes(), tree.sources.tobytes()


class Acceptance:
    """Counts tokens; observed from any thread.

    A token counts if it lies on the path that the session's text took through the last tree, so also where the worker
    verified fewer nodes than it got, or drafted from elsewhere because the answer came late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (max(Tier) + 1)

    def observe(self, draft: Draft, text: np.ndarray) -> None:
        """text: int, what the session went on with from the draft's root; not empty."""
        tokens, parents, sources = draft
        if text.item(0) not in tokens:
            return
        path = _path(tokens, memoryview(parents).cast("i"), text[: len(tokens)].tolist())
        with self._lock:
            for node in path:
                self._counts[sources[node]] += 1

    def counts(self) -> dict[Tier, int]:
        with self._lock:
            return {tier: self._counts[tier] for tier in Tier}


def _path(tokens: list[int], parents: memoryview, text: list[int]) -> list[int]:
    """The nodes that `text` walks down from the root; one pass, since a child comes after its parent."""
    path: list[int] = []
    node, wanted = -1, text[0]
    for at, token in enumerate(tokens):
        if token == wanted and parents[at] == node:
            path.append(at)
            if len(path) == len(text):
                break
            node, wanted = at, text[len(path)]
            if wanted not in tokens:
                break
    return path
