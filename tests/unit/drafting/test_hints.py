"""The datastore's proposals beside what is verified."""

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree, Tier
from sglang_patches.drafting.speculation import hints_of

ROOT, NODES = 7, np.array([11, -3, 12])


def tree(*rows):
    """Of parent, token and path probability."""
    parents, tokens, probs = zip(*rows, strict=True)
    sources = np.full(len(rows), Tier.LIVE, np.uint8)
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32), sources
    )


VERIFIED = tree((-1, 5, 0.5), (0, 6, 0.4), (1, 8, 0.2))


@pytest.mark.parametrize(
    ("proposed", "expected"),
    [
        (EMPTY_TREE, []),
        (VERIFIED, []),
        (tree((-1, 9, 0.4)), [(ROOT, 9, 0.4)]),
        (tree((-1, 5, 0.5), (-1, 9, 0.25), (0, 7, 0.1)), [(ROOT, 9, 0.25), (11, 7, 0.2)]),
        (
            tree((-1, 9, 0.4), (0, 6, 0.3)),
            [(ROOT, 9, 0.4)],
        ),  # a node that is not verified has no end below it
        (tree((-1, 5, 1), (0, 6, 0.5), (1, 8, 0.5), (2, 4, 0.25), (1, 3, 0.1)), [(12, 4, 0.5), (-3, 3, 0.2)]),
    ],
)
def test_children_that_are_not_verified_of_nodes_that_are(proposed, expected):
    hints = hints_of(proposed, VERIFIED, ROOT, NODES)
    found = zip(hints.parents.tolist(), hints.tokens.tolist(), hints.probabilities.tolist(), strict=True)
    assert [(parent, token, pytest.approx(chance)) for parent, token, chance in found] == expected
    assert (hints.parents.dtype, hints.tokens.dtype, hints.probabilities.dtype) == (
        np.int64,
        np.int32,
        np.float32,
    )


def test_without_a_verified_tree_the_first_tokens_are_left():
    hints = hints_of(tree((-1, 5, 0.5), (0, 6, 0.4), (-1, 9, 0.3)), EMPTY_TREE, ROOT, np.empty(0, np.int64))
    assert hints.parents.tolist() == [ROOT, ROOT] and hints.tokens.tolist() == [5, 9]
