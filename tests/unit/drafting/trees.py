"""Trees by hand, and what is in one."""

import numpy as np
import pytest

from datastore_service.protocol.tree import DraftTree


def tree_of(rows, source=3):
    """rows: token, parent, estimate."""
    tokens, parents, estimates = zip(*rows, strict=True) if rows else ((), (), ())
    return DraftTree(
        np.array(tokens, np.int32),
        np.array(parents, np.int32),
        np.array(estimates, np.float32),
        np.full(len(rows), source, np.uint8),
    )


def paths(tree):
    """Estimate and source by the tokens down to a node."""
    found = {}
    names = []
    for parent, token, estimate, source in zip(
        tree.parents.tolist(), tree.tokens.tolist(), tree.probs.tolist(), tree.sources.tolist(), strict=True
    ):
        names.append((*(names[parent] if parent >= 0 else ()), token))
        found[names[-1]] = pytest.approx(estimate), source
    return found
