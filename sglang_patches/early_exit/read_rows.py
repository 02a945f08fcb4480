"""Which rows of a verification its early exit reads.

A row costs a whole output head. More of them than the draft process can guess after would be read for nothing.
"""

from __future__ import annotations

import numpy as np

from sglang_patches.verification.layout import PADDING


def likeliest_ends(packed: np.ndarray, reached: np.ndarray, most: int) -> np.ndarray:
    """Rows at which the verification most likely ends, int64 [min(most, batch * width)], ascending. packed: from `layout.pack`. reached:
    float32 [batch, width - 1], the probability of each node, from `layout.pack_reached`. Padding comes last."""
    ends = np.insert(reached, 0, 1.0, axis=1)
    batch, node = np.nonzero(packed[:, 1] != PADDING)
    np.subtract.at(ends, (batch, packed[batch, 1, node] + 1), reached[batch, node])
    ends[:, 1:][packed[:, 1] == PADDING] = -np.inf
    return np.sort(np.argsort(-ends, axis=None, kind="stable")[:most])
