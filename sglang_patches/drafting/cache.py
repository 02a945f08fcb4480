"""The speculation cache: a trie a session, which the draft side's growth fills."""

from __future__ import annotations

import heapq

import numpy as np
from prometheus_client import Counter

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import MAX_VOCAB, SessionName
from sglang_patches.exchange.messages import Growth
from sglang_patches.exchange.trie import ROOT, Trie

MOST_NUMBER = 1 << 62  # the draft side counts on from the numbers that it hears of, in int64
DROPPED = Counter(
    "specstore_growth_dropped",
    "Drafted tokens that the worker dropped: too late for their step (epoch, parent, session), twice (replay), after a gap (gap). Those that "
    "cannot be right (invalid) or are too many (full) mean a fault of the draft process",
    ["reason"],
)
_EPOCH, _FULL, _GAP, _INVALID, _PARENT, _REPLAY, _SESSION = map(
    DROPPED.labels, ("epoch", "full", "gap", "invalid", "parent", "replay", "session")
)


class SpeculationCache:
    """The tries of all sessions. What the draft side says is not trusted: its growth may be of any form.

    vocabulary: number of token ids."""

    def __init__(self, vocabulary: int = MAX_VOCAB) -> None:
        self._vocabulary = vocabulary
        self._tries: dict[SessionName, Trie] = {}

    def __contains__(self, session: str) -> bool:
        return session in self._tries

    def trie(self, session: str) -> Trie:
        return self._tries[session]

    def open(self, session: str, length: int) -> Trie:
        """Begins, or begins again in a new epoch, with `length` committed tokens."""
        trie = self._tries.get(session)
        if trie is None:
            trie = self._tries[session] = Trie(length)
        else:
            trie.length = length
            trie.begin_epoch(trie.epoch + 1)
        return trie

    def close(self, session: str) -> None:
        self._tries.pop(session, None)

    def grow(self, growth: Growth) -> bool:
        """Adds nodes. Those of an epoch that is over, or below a node that is gone, those that cannot be right, those for which there
        is no room, and a growth that came before are dropped and counted. False after a gap: what is missing will not come again."""
        trie = self._tries.get(growth.session)
        if trie is None or trie.epoch != growth.epoch or growth.turn < trie.turn:
            (_SESSION if trie is None else _EPOCH if trie.epoch != growth.epoch else _REPLAY).inc(
                len(growth.tokens)
            )
            return True
        if growth.turn > trie.turn:
            _GAP.inc(len(growth.tokens))
            return False
        trie.turn += 1
        self._add(trie, growth)
        return True

    def _add(self, trie: Trie, growth: Growth) -> None:
        arrays = growth.nodes, growth.parents, growth.tokens, growth.probabilities
        sizes = [len(array) for array in arrays]
        if min(sizes) < max(sizes):
            _INVALID.inc(max(sizes))
            return
        orphans = invalid = surplus = 0
        for node, parent, token, probability in zip(*(array.tolist() for array in arrays), strict=True):
            if parent not in trie:
                orphans += 1
            elif not (
                0 <= token < self._vocabulary and probability >= 0.0 and _may_have(trie, node, parent, token)
            ):
                invalid += 1
            elif trie.full:
                surplus += 1
            else:
                trie.add(node, parent, token, min(probability, 1.0))
        for counter, dropped in ((_PARENT, orphans), (_INVALID, invalid), (_FULL, surplus)):
            if dropped:
                counter.inc(dropped)

    def advance(self, session: str, start: int, tokens: np.ndarray) -> bool:
        """Whether the tokens committed after the first `start` were foreseen. What is known already is skipped; after a gap
        nothing is foreseen."""
        trie = self._tries[session]
        if start > trie.length:
            trie.length = start + len(tokens)
            trie.begin_epoch(trie.epoch + 1)
            return False
        news = tokens[trie.length - start :].tolist()
        return trie.advance(trie.follow(news), len(news))

    def subtree(self, session: str, nodes: int, depth: int, source: int) -> DraftTree:
        """The likeliest `nodes` nodes below the root down to `depth`, best first."""
        trie = self._tries[session]
        waiting = [(-p, node, -1, token, 1) for node, token, p in trie.children(trie.root)]
        heapq.heapify(waiting)
        found: list[tuple[int, int, float]] = []
        while waiting and len(found) < nodes and depth > 0:
            negative, node, parent, token, level = heapq.heappop(waiting)
            if level < depth:
                for child, below, p in trie.children(node):
                    heapq.heappush(waiting, (negative * p, child, len(found), below, level + 1))
            found.append((parent, token, -negative))
        if not found:
            return EMPTY_TREE
        parents, tokens, probabilities = zip(*found, strict=True)
        return DraftTree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(probabilities, np.float32),
            np.full(len(found), source, np.uint8),
        )


def _may_have(trie: Trie, node: int, parent: int, token: int) -> bool:
    """Whether the draft side may give the number to this token. It makes no negative ones, but repeats them."""
    if node >= trie.next_node:  # most often
        return node < MOST_NUMBER
    return (node > ROOT or node in trie) and trie.is_free(node, parent, token)
