"""SSSD as its paper describes it (Marzollo et al., Algorithms 1 to 3 with their constants), to compare the engine's drafts with.

No tree of continuations is built: a node is the list of places where its path ends, and what is drafted is split into its
children."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from benchmarks.replay.method import Method, tree_of
from datastore_service.engine.segment import Segment, build_segment
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import MAX_DEPTH

SAMPLES = 100  # continuations read for each length of the prefix
ENOUGH = 50  # continuations for which the prefix is not shortened
INPUT_PREFIX = 4  # longest prefix looked up in prompt and output
INPUT_DISCOUNT = 0.6  # of what these propose
DATASTORE_MATCH = 4  # which Algorithm 3 gives the datastore's tree
STOP = -1  # in place of a token, where a text ends

Place = tuple[Sequence[int], int]  # a text, and a position in it


class SubIndex:
    """A suffix array over documents, searched by binary search."""

    def __init__(self, segment: Segment) -> None:
        tokens = segment.tokens.astype(np.int64)
        self._tokens: list[int] = np.where(tokens == segment.separator, STOP, tokens).tolist()
        self._bytes = tokens.astype(">u4").tobytes()  # in the order of the tokens
        self._rows = segment.suffix_array()

    def rows(self, prefix: np.ndarray) -> np.ndarray:
        """Where each occurrence begins, in the suffix array's order."""
        wanted = prefix.astype(">u4").tobytes()

        def beginning(row: int) -> bytes:
            return self._bytes[4 * row : 4 * row + len(wanted)]

        low = bisect_left(self._rows, wanted, key=beginning)
        high = bisect_right(self._rows, wanted, lo=low, key=beginning)
        return self._rows[low:high]

    def continuations(self, rows: np.ndarray, size: int) -> list[Place]:
        """What follows the `size` tokens that begin at each row."""
        return [(self._tokens, row + size) for row in rows.tolist()]


def from_datastore(indices: Sequence[SubIndex], prefix: np.ndarray) -> list[Place]:
    """Algorithm 2: continuations at regular intervals, of ever shorter prefixes until there are enough. The authors' program
    counts continuations, as here, and ends with one token; the paper leaves both open."""
    found: list[Place] = []
    for size in range(len(prefix), 0, -1):
        rows = [index.rows(prefix[-size:]) for index in indices]
        step = max(1, sum(map(len, rows)) // SAMPLES)
        for index, own in zip(indices, rows, strict=True):
            found += index.continuations(own[::step], size)
        if len(found) >= ENOUGH:
            break
    return found


def from_input(text: np.ndarray, match: int) -> list[Place]:
    """Algorithm 1: what follows each occurrence of the last `match` tokens. The last occurrence counts, and nothing follows it."""
    windows = np.lib.stride_tricks.sliding_window_view(text, match)
    tokens = [*text.tolist(), STOP]
    return [(tokens, int(at) + match) for at in np.flatnonzero((windows == windows[-1]).all(axis=1))]


def damping(match: int) -> float:
    return 0.6 + 0.1 * match


@dataclass(frozen=True)
class Branch:
    """A node of a tree of continuations.

    places: where its path ends. damping: factor on the estimates of its children."""

    places: Sequence[Place]
    damping: float

    def children(self) -> Iterator[tuple[int, float, Branch]]:
        """Token, estimate given this node, and node of each child."""
        following = defaultdict(list)
        for tokens, at in self.places:
            if tokens[at] != STOP:
                following[tokens[at]].append((tokens, at + 1))
        for token, places in following.items():
            yield token, len(places) / len(self.places), Branch(places, self.damping)


def merged(trees: Sequence[tuple[float, Branch]], nodes: int, branch: int) -> DraftTree:
    """Algorithm 3: the likeliest nodes of all trees. A node that several trees have keeps the largest estimate.

    trees: the discount of each and its root. branch: longest path."""
    queue = [
        (-discount * share, -1, order, token, -1, child)
        for order, (discount, root) in enumerate(trees)
        for token, share, child in root.children()
    ]
    heapify(queue)
    drafted: dict[tuple[int, int], int] = {}
    while queue and len(drafted) < nodes:
        estimate, depth, order, token, parent, node = heappop(queue)
        place = drafted.setdefault((parent, token), len(drafted))
        if -depth < branch:
            for following, share, child in node.children():
                heappush(queue, (estimate * share * node.damping, depth - 1, order, following, place, child))
    return tree_of([token for _, token in drafted], [parent for parent, _ in drafted])


class Sssd(Method):
    """Finished outputs are one more sub-index, which is sorted again after each; the paper's, every few minutes.

    prior: static sub-indices. prefix: tokens looked up in the datastore (the paper: 4). branch: longest continuation (the paper
    gives no number)."""

    def __init__(
        self, prior: Sequence[Segment], vocab_size: int, nodes: int, prefix: int, branch: int = MAX_DEPTH
    ) -> None:
        self._prior = [SubIndex(segment) for segment in prior]
        self._vocab_size, self._nodes, self._prefix, self._branch = vocab_size, nodes, prefix, branch
        self._outputs: list[np.ndarray] = []
        self._live: list[SubIndex] = []
        self._prompt = 0

    def begin(self, prompt: np.ndarray) -> None:
        self._prompt = len(prompt)

    def draft(self, text: np.ndarray) -> DraftTree:
        stored = from_datastore([*self._prior, *self._live], text[-self._prefix :])
        trees = [(1.0, Branch(stored, damping(DATASTORE_MATCH)))]
        for match in range(min(INPUT_PREFIX, len(text)), 0, -1):
            trees.append((INPUT_DISCOUNT, Branch(from_input(text, match), damping(match))))
        return merged(trees, self._nodes, self._branch)

    def end(self, text: np.ndarray) -> None:
        self._outputs.append(text[self._prompt :])
        self._live = [SubIndex(build_segment(self._outputs, self._vocab_size))]
