"""Draft trees of a batch as the static arrays that one target forward verifies.

Every request has `width` nodes: node 0 is the root (its last accepted token), then the tree depth first, the rest is
padding. Depth first, the most probable path lies in consecutive KV slots as in plain decoding: a bfloat16 sum over keys rounds
by their places.
No walk reaches padding, because nothing links to it. It has the root's position and attends only to the root and itself.

The forward has a row for every node, padding too, where all requests must have the same number of rows. Where they need not
(`TreeLayout.rows`), each request has as many rows as it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import torch

from datastore_service.protocol.tree import DraftTree

PADDING = -2


def pack(trees: Sequence[DraftTree], width: int | np.ndarray) -> np.ndarray:
    """int32 [batch, 2, width - 1]: tokens and parents of each tree's first nodes, depth first; padding has parent
    PADDING.

    width: of all, or int64 [batch], of each request; the widest one's is then that of the array.
    """
    return _packed([tree.tokens for tree in trees], trees, width)


def pack_reached(trees: Sequence[DraftTree], width: int | np.ndarray) -> np.ndarray:
    """float32 [batch, width - 1]: the nodes' probabilities in the order of `pack`; padding has 0."""
    return _packed([tree.probs.view(np.int32) for tree in trees], trees, width)[:, 0].view(np.float32)


def _packed(values: Sequence[np.ndarray], trees: Sequence[DraftTree], width: int | np.ndarray) -> np.ndarray:
    """Packs values and parents in the order of `pack`.

    values: int32 [nodes] of each tree, in the tokens' place.
    """
    most = np.broadcast_to(np.asarray(width, np.int64) - 1, len(trees))
    packed = np.zeros((len(trees), 2, most.max(initial=0)), dtype=np.int32)
    packed[:, 1] = PADDING
    sizes = np.array([len(tree.tokens) for tree in trees], np.int64)
    if packed.shape[2] and sizes.any():
        parents = np.concatenate([tree.parents for tree in trees])
        _pack(np.concatenate(values), parents, sizes, np.ascontiguousarray(most), packed)
    return packed


@numba.njit(cache=True, nogil=True)
def _pack(values, parents, sizes, most, packed):  # pragma: no cover
    """Packs several trees.

    values, parents: of the trees, one after the other. sizes, most: int64 [trees], their nodes and how many of these are packed.
    """
    begin = 0
    for tree in range(len(sizes)):
        end = begin + min(sizes[tree], most[tree])
        _depth_first(values[begin:end], parents[begin:end], packed[tree])
        begin += sizes[tree]


@numba.njit
def _depth_first(values, parents, out):  # pragma: no cover
    """Writes the tree into out [2, >= nodes], every node followed by its first child, then by its next sibling."""
    nodes = len(values)
    first_child = np.full(nodes + 1, -1, np.int32)  # of node i at i + 1, of the root at 0
    next_sibling = np.full(nodes, -1, np.int32)
    for node in range(nodes - 1, -1, -1):
        next_sibling[node] = first_child[parents[node] + 1]
        first_child[parents[node] + 1] = node
    place = np.full(nodes + 1, -1, np.int32)  # of node i at i + 1; the root's is -1
    waiting = np.empty(nodes, np.int32)
    depth, count, node = 0, 0, first_child[0]
    while node != -1:
        place[node + 1] = count
        out[0, count] = values[node]
        out[1, count] = place[parents[node] + 1]
        count += 1
        waiting[depth] = next_sibling[node]
        depth += 1
        node = first_child[node + 1]
        while node == -1 and depth > 0:
            depth -= 1
            node = waiting[depth]


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Arrays of one verification, all on the host. A node's number is request * width + its place.

    tokens, positions: int64 [batch * width], by node. mask: bool [batch, width, width], node attends to node.
    retrieve_index, next_token, next_sibling: int64 [batch, width], SGLang's first-child / next-sibling links, -1 ends.
    widths: int64 [batch], nodes of each request that the forward has a row for.
    """

    tokens: np.ndarray
    positions: np.ndarray
    mask: np.ndarray
    retrieve_index: np.ndarray
    next_token: np.ndarray
    next_sibling: np.ndarray
    widths: np.ndarray

    @property
    def uniform(self) -> bool:
        """Whether every node has a row, of its own number."""
        return bool((self.widths == self.mask.shape[1]).all())

    @property
    def rows(self) -> np.ndarray:
        """int64 [rows of the forward]: the node of each."""
        return np.flatnonzero(np.arange(self.mask.shape[1]) < self.widths[:, None])

    @property
    def first_rows(self) -> np.ndarray:
        """int64 [batch]: the row of each request's root. Its other nodes' rows follow in their order."""
        return np.cumsum(self.widths) - self.widths

    @property
    def rows_of_nodes(self) -> np.ndarray:
        """int64 [batch, width]: the row of each node; for one without, its request's last."""
        places = np.minimum(np.arange(self.mask.shape[1]), self.widths[:, None] - 1)
        return self.first_rows[:, None] + places


def lay_out(
    packed: np.ndarray, roots: np.ndarray, seq_lens: np.ndarray, widths: np.ndarray | None = None
) -> TreeLayout:
    """Lays out the packed trees for one verification.

    packed: from `pack`.
    roots: int64 [batch], the last accepted tokens.
    seq_lens: int64 [batch], cached KV lengths, which are also the roots' positions.
    widths: int64 [batch], rows of each request, its whole tree among them; None for a row of every node.
    """
    batch, _, nodes = packed.shape
    width = nodes + 1
    layout = TreeLayout(
        tokens=np.empty(batch * width, np.int64),
        positions=np.empty(batch * width, np.int64),
        mask=np.zeros((batch, width, width), np.bool_),
        retrieve_index=np.arange(batch * width, dtype=np.int64).reshape(batch, width),
        next_token=np.full((batch, width), -1, np.int64),
        next_sibling=np.full((batch, width), -1, np.int64),
        widths=np.full(batch, width, np.int64) if widths is None else widths,
    )
    _fill(
        packed,
        roots,
        seq_lens,
        layout.tokens,
        layout.positions,
        layout.mask,
        layout.next_token,
        layout.next_sibling,
    )
    return layout


@numba.njit(cache=True, nogil=True)
def _fill(packed, roots, seq_lens, tokens, positions, mask, next_token, next_sibling):  # pragma: no cover
    batch, _, nodes = packed.shape
    width = nodes + 1
    for b in range(batch):
        base = b * width
        tokens[base] = roots[b]
        positions[base] = seq_lens[b]
        mask[b, 0, 0] = True
        for node in range(nodes):
            row = node + 1
            parent = packed[b, 1, node] + 1
            tokens[base + row] = packed[b, 0, node]
            mask[b, row, 0] = True
            mask[b, row, row] = True
            if parent < 0:  # padding
                positions[base + row] = seq_lens[b]
                continue
            positions[base + row] = positions[base + parent] + 1
            for column in range(parent + 1):
                mask[b, row, column] |= mask[b, parent, column]
        for row in range(width - 1, 0, -1):  # backwards: the earliest child becomes the first one
            parent = packed[b, 1, row - 1] + 1
            if parent >= 0:
                next_sibling[b, row] = next_token[b, parent]
                next_token[b, parent] = row


def attention_mask(mask: np.ndarray, seq_lens: np.ndarray, device: str | torch.device) -> torch.Tensor:
    """What the attention backend takes as `custom_mask`: on a CPU the tree part alone, flat, as SGLang's own n-gram worker
    passes it; elsewhere `full_mask`."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(mask.reshape(-1))
    return full_mask(mask, seq_lens, device)


def full_mask(mask: np.ndarray, seq_lens: np.ndarray, device: torch.device) -> torch.Tensor:
    """The mask accelerator backends take: bool, flat, per request `width` rows of (cached tokens + tree)."""
    batch, width, _ = mask.shape
    row_lengths = seq_lens + width
    starts = np.cumsum(width * row_lengths) - width * row_lengths
    rows = np.arange(width)
    index = (
        (starts + seq_lens)[:, None, None]
        + rows[None, :, None] * row_lengths[:, None, None]
        + rows[None, None, :]
    )
    full = torch.ones(int((width * row_lengths).sum()), dtype=torch.bool, device=device)
    places, tree = (
        torch.from_numpy(array.reshape(-1)).to(device, non_blocking=True) for array in (index, mask)
    )
    full[places] = tree
    return full


def likeliest_ends(packed: np.ndarray, reached: np.ndarray, most: int) -> np.ndarray:
    """Rows at which the verification most likely ends, int64 [min(most, batch * width)], ascending. packed: from `layout.pack`. reached:
    float32 [batch, width - 1], the probability of each node, from `layout.pack_reached`. Padding comes last."""
    ends = np.insert(reached, 0, 1.0, axis=1)
    batch, node = np.nonzero(packed[:, 1] != PADDING)
    np.subtract.at(ends, (batch, packed[batch, 1, node] + 1), reached[batch, node])
    ends[:, 1:][packed[:, 1] == PADDING] = -np.inf
    return np.sort(np.argsort(-ends, axis=None, kind="stable")[:most])
