"""Which rows of a verification the early exit reads, against a slow count of the ways in which it may end."""

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from sglang_patches.verification.layout import likeliest_ends, pack, pack_reached


def tree(parents, probs):
    nodes = len(parents)
    return DraftTree(
        np.arange(nodes, dtype=np.int32),
        np.array(parents, np.int32),
        np.array(probs, np.float32),
        np.ones(nodes, np.uint8),
    )


def read(trees, width, most):
    return likeliest_ends(pack(trees, width), pack_reached(trees, width), most).tolist()


def test_the_likeliest_ends_of_all_requests_are_read():
    """A sure chain ends at its end, an unsure one at its root; 0.9 * 0.5 ends between."""
    trees = [tree([-1, 0], [1.0, 1.0]), tree([-1], [0.1]), tree([-1, 0], [0.9, 0.45])]
    assert read(trees, 3, 2) == [2, 3]
    assert read(trees, 3, 4) == [2, 3, 7, 8]


def test_siblings_take_from_their_parent():
    """Root 0.1, its children 0.5 - 0.4 and 0.4, the grandchild 0.4; depth first the grandchild comes second."""
    assert read([tree([-1, -1, 0], [0.5, 0.4, 0.4])], 4, 2) == [2, 3]


def test_padding_is_read_last_and_an_empty_tree_ends_at_its_root():
    assert read([EMPTY_TREE, tree([-1], [1.0])], 3, 3) == [0, 3, 4]
    assert read([EMPTY_TREE], 3, 9) == [0, 1, 2], "no more rows than there are"


@pytest.mark.parametrize("seed", range(20))
def test_the_chances_are_those_of_the_ways_down(seed):
    rng = np.random.default_rng(seed)
    width, trees = 8, []
    for _ in range(5):
        parents = [int(rng.integers(-1, at)) if at else -1 for at in range(rng.integers(0, 11))]
        left, probs = {-1: 1.0}, []
        for at, parent in enumerate(parents):
            probs.append(left[parent] * float(rng.random()))
            left[parent] -= probs[-1]
            left[at] = probs[-1]
        trees.append(tree(parents, probs))
    packed, ends = pack(trees, width), np.full((5, width), -1.0)
    for request, of in enumerate(trees):
        kept = of.first(width - 1)
        for at in range(-1, len(kept)):
            row = 0 if at < 0 else 1 + packed[request, 0].tolist().index(kept.tokens[at])
            reached = 1.0 if at < 0 else kept.probs[at]
            ends[request, row] = reached - kept.probs[kept.parents == at].sum()
    for most in (1, 7, 24):
        found = ends.ravel()[read(trees, width, most)]
        assert found.sum() == pytest.approx(np.sort(ends.ravel())[::-1][:most].sum(), abs=1e-4)
