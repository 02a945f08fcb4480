"""The datastore's proposals as guesses. It is asked in every step anyway, so they need no further question and no draft forward."""

from __future__ import annotations

import numpy as np

from datastore_service.protocol.tree import DraftTree
from sglang_patches.exchange.messages import NO_HINTS, Hints


def hints_of(proposed: DraftTree, verified: DraftTree, root: int, nodes: np.ndarray) -> Hints:
    """The children that `proposed` has at the nodes that both trees have, and that are not in `verified`.

    root, nodes: the numbers of the root and of the nodes of `verified` in the session's trie.
    """
    if not len(proposed) or proposed is verified:
        return NO_HINTS
    there = {
        edge: at
        for at, edge in enumerate(zip(verified.parents.tolist(), verified.tokens.tolist(), strict=True))
    }
    shared = {-1: -1}  # nodes of `proposed` -> of `verified`
    found: list[tuple[int, int, float]] = []
    rows = zip(proposed.parents.tolist(), proposed.tokens.tolist(), proposed.probs.tolist(), strict=True)
    for at, (parent, token, chance) in enumerate(rows):
        if parent not in shared:
            continue
        above = shared[parent]
        if (above, token) in there:
            shared[at] = there[above, token]
        else:
            reached = 1.0 if parent < 0 else float(proposed.probs[parent])
            found.append((root if above < 0 else int(nodes[above]), token, chance / max(reached, 1e-9)))
    if not found:
        return NO_HINTS
    parents, tokens, chances = zip(*found, strict=True)
    return Hints(np.array(parents, np.int64), np.array(tokens, np.int32), np.array(chances, np.float32))
