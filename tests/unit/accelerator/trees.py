"""Draft trees laid out as the worker lays them out, and what each row has to attend to, told from the parents alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from datastore_service.protocol.tree import DraftTree
from sglang_patches.verification.layout import PADDING, TreeLayout, full_mask, lay_out, pack

WIDTHS = (1, 2, 3, 8, 17, 33, 64)
LENGTHS = (1, 37, 64, 129, 190, 5)  # ragged, on either side of the kernels' blocks of 64 keys
VOCABULARY = 97


def _parents(rng: np.random.Generator, nodes: int, shape: str) -> list[int]:
    if shape == "chain":
        return list(range(-1, nodes - 1))
    if shape == "star":
        return [-1] * nodes
    return [int(rng.integers(-1, i)) for i in range(nodes)]


def random_tree(rng: np.random.Generator, nodes: int, shape: str = "random") -> DraftTree:
    """Siblings carry different tokens, as the engine's do."""
    parents = _parents(rng, nodes, shape)
    first = rng.integers(VOCABULARY, size=nodes + 1)
    tokens = [(first[p] + parents[:i].count(p)) % VOCABULARY for i, p in enumerate(parents)]
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.full(nodes, 0.5, np.float32),
        np.ones(nodes, np.uint8),
    )


def forest(width: int, seed: int = 0) -> list[DraftTree]:
    """A tree for each of LENGTHS: full and half empty ones, a chain, a star, and none at all."""
    rng = np.random.default_rng([width, seed])
    full = width - 1
    return [
        random_tree(rng, full),
        random_tree(rng, full // 2),
        random_tree(rng, full, "chain"),
        random_tree(rng, full, "star"),
        random_tree(rng, full),
        random_tree(rng, 0),
    ]


@dataclass(frozen=True)
class Verification:
    """One batch's trees; parents [batch][width]: the row each row hangs on, -1 at the root, None for padding."""

    layout: TreeLayout
    seq_lens: np.ndarray
    parents: list[list[int | None]]

    @property
    def width(self) -> int:
        return self.layout.mask.shape[1]

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)

    @property
    def mask(self) -> torch.Tensor:
        return full_mask(self.layout.mask, self.seq_lens, torch.device("cpu"))

    def path(self, request: int, row: int) -> list[int]:
        """Rows from the root down to this one; of padding the root and itself."""
        parent = self.parents[request][row]
        if parent is None:
            return [0, row]
        return [row] if parent < 0 else [*self.path(request, parent), row]

    def attended(self, request: int, row: int) -> list[int]:
        """Columns the row attends to, in the request's cached tokens followed by its rows."""
        cached = int(self.seq_lens[request])
        return [*range(cached), *(cached + r for r in self.path(request, row))]

    @property
    def tokens(self) -> np.ndarray:
        """int64 [batch, width]"""
        return self.layout.tokens.reshape(self.batch_size, self.width)

    def likely_tokens(self, rng: np.random.Generator) -> np.ndarray:
        """int64 [batch, width]: a target's token at each row, usually that of one of the row's children."""
        target = rng.integers(VOCABULARY, size=self.tokens.shape)
        for request, parents in enumerate(self.parents):
            for row in rng.permutation(self.width)[: self.width * 3 // 4]:
                if row and parents[row] is not None:
                    target[request, parents[row]] = self.tokens[request, row]
        return target

    def walk(self, request: int, target: np.ndarray) -> list[int]:
        """Rows that are accepted, from the root down, where the target's tokens are `target` [width]."""
        path = [0]
        while True:
            children = [row for row in range(1, self.width) if self.parents[request][row] == path[-1]]
            accepted = [row for row in children if self.tokens[request, row] == target[path[-1]]]
            if not accepted:
                return path
            path.append(accepted[0])

    def off_first_path(self) -> set[tuple[int, int]]:
        """(request, row) of every row whose path is not simply the rows above it."""
        rows = ((b, r) for b in range(self.batch_size) for r in range(self.width))
        return {(b, r) for b, r in rows if self.path(b, r) != list(range(r + 1))}

    def in_window(self, request: int, row: int, window: int) -> list[int]:
        """The attended columns at most `window` positions back, as plain decoding attends to them."""
        return self._near(request, row, window, len(self.path(request, row)) - 1)

    def in_window_of_rows(self, request: int, row: int, window: int) -> list[int]:
        """The same, a row's number taken for its depth in the tree."""
        return self._near(request, row, window, row)

    def _near(self, request: int, row: int, window: int, ahead: int) -> list[int]:
        cached = int(self.seq_lens[request])
        path = self.path(request, row)
        back = dict.fromkeys(path)
        for step, r in enumerate(path):
            back[r] = row - r if ahead == row else len(path) - 1 - step
        near = [c for c in range(cached) if cached + ahead - c <= window]
        return near + [cached + r for r in path if back[r] <= window]

    def flipped(self, request: int, row: int, column: int) -> torch.Tensor:
        """The mask with one bit of the tree wrong."""
        mask = self.layout.mask.copy()
        mask[request, row, column] ^= True
        return full_mask(mask, self.seq_lens, torch.device("cpu"))


def verification(trees: Sequence[DraftTree], width: int, seq_lens: Sequence[int] = LENGTHS) -> Verification:
    packed = pack(trees, width)
    lengths = np.array(seq_lens[: len(trees)], np.int64)
    roots = np.arange(len(trees), dtype=np.int64) % VOCABULARY
    parents = [[-1, *(None if p == PADDING else p + 1 for p in request[1].tolist())] for request in packed]
    return Verification(lay_out(packed, roots, lengths), lengths, parents)
