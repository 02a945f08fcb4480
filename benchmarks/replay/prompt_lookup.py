"""Prompt lookup decoding (Saxena 2023): what followed the last tokens where they first stood in this text."""

from __future__ import annotations

import numpy as np

from benchmarks.replay.method import Method, chain_of
from datastore_service.protocol.tree import EMPTY_TREE, DraftTree

LONGEST = 3  # tokens looked up, down to one: the original's setting


class PromptLookup(Method):
    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def draft(self, text: np.ndarray) -> DraftTree:
        for length in range(min(LONGEST, len(text) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
            found = np.flatnonzero((windows == text[-length:]).all(axis=1))
            if len(found):
                follow = int(found[0]) + length
                return chain_of(text[follow : follow + self._nodes].tolist())
        return EMPTY_TREE
