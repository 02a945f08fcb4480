"""A batch's trees settled at once, against each settled alone."""

from collections.abc import Sequence

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Rejected
from sglang_patches.ledger.outcome import settle
from tests.unit.drafting.texts import make_tree


def accepted_nodes(tree: DraftTree, accepted: Sequence[int]) -> np.ndarray:
    """The slow oracle. bool [nodes]: which of the verified tree's nodes lie on the path of the tokens accepted after it was drafted."""
    on_path = np.zeros(len(tree), dtype=np.bool_)
    node = -1
    for token in accepted:
        chosen = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if len(chosen) == 0:
            break
        node = int(chosen[0])
        on_path[node] = True
    return on_path


def rejected_siblings(tree: DraftTree, length: int, on_path: np.ndarray) -> tuple[Rejected, ...]:
    """The slow oracle. The drafted tokens that were verified and refused: at each depth of the accepted path, the siblings of the token
    the target chose. length: tokens of the session before the step."""
    rejected = []
    for depth, node in enumerate([-1, *np.flatnonzero(on_path).tolist()]):
        refused = (tree.parents == node) & ~on_path
        if refused.any():
            rejected.append(Rejected(length + depth, tree.tokens[refused]))
    return tuple(rejected)


def _random_tree(rng, nodes):
    """Few different tokens, so that paths are followed; siblings may even share one."""
    return make_tree(
        rng.integers(0, 3, nodes), [rng.integers(-1, node) if node else -1 for node in range(nodes)]
    )


def _listed(rejected):
    return [(refused.position, refused.tokens.tolist()) for refused in rejected]


@pytest.mark.parametrize("batch", [1, 3, 48])
def test_a_batch_is_settled_as_each_of_its_trees_alone(batch):
    rng = np.random.default_rng(batch)
    deepest = 0
    for _ in range(200):
        trees = [_random_tree(rng, rng.integers(0, 16)) for _ in range(batch)]
        lengths = rng.integers(1, 100, batch).tolist()
        accepted = [rng.integers(0, 3, rng.integers(0, 6)).astype(np.int32) for _ in trees]
        outcomes = settle(range(batch), trees, lengths, accepted)
        expected = [accepted_nodes(tree, of_tree) for tree, of_tree in zip(trees, accepted, strict=True)]
        for request, outcome in enumerate(outcomes):
            tree, length, nodes = trees[request], lengths[request], expected[request]
            assert (outcome.request, outcome.start, outcome.tree) == (request, length, tree)
            assert outcome.accepted.tolist() == nodes.tolist()
            assert _listed(outcome.refused) == _listed(rejected_siblings(tree, length, nodes))
            deepest = max(deepest, int(nodes.sum()))
    assert deepest > 2


def test_rejection_stops_where_the_path_leaves_the_tree():
    tree = make_tree([10, 11, 12], [-1, -1, 0])
    first, plain = settle(
        ["a", "b"], [tree, EMPTY_TREE], [5, 8], [np.array([99], np.int32), np.array([7, 8], np.int32)]
    )
    assert not first.accepted.any() and plain.refused == ()
    assert _listed(first.refused) == [(5, [10, 11])]
    assert plain.tokens.tolist() == [7, 8] and len(plain.tree) == 0


def test_plain_steps_have_outcomes_too():
    (outcome,) = settle(["a"], [EMPTY_TREE], [5], [np.array([99], np.int32)])
    assert (outcome.start, outcome.tokens.tolist(), outcome.refused) == (5, [99], ())
    assert settle([], [], [], []) == []
