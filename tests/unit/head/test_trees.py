"""What a head drafts, read from SGLang's verification of it, and its union with what retrieval has found."""

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget
from sglang_patches.ledger.requests import ALL_SOURCES, DraftSource
from sglang_patches.ledger.usage import HEAD
from sglang_patches.step.acceptance import Acceptance

pytest.importorskip("sglang")

from sglang_patches.head.own import GRADES, trees_of  # noqa: E402
from sglang_patches.head.source import BesideHead  # noqa: E402
from sglang_patches.step.sources import Sources  # noqa: E402
from sglang_patches.verification.layout import lay_out, pack  # noqa: E402


def chain(tokens, source=HEAD, probs=None):
    size = len(tokens)
    rows = np.arange(size, dtype=np.int32)
    probs = GRADES[:size] if probs is None else np.array(probs, np.float32)
    return DraftTree(np.array(tokens, np.int32), rows - 1, probs, np.full(size, source, np.uint8))


def links(trees, width):
    """As in an `EagleVerifyInput`."""
    layout = lay_out(pack(trees, width), np.zeros(len(trees), np.int64), np.zeros(len(trees), np.int64))
    return layout.tokens.reshape(-1, width), layout.next_token, layout.next_sibling


def random_tree(rng, nodes):
    parents = np.array([rng.integers(-1, node) for node in range(nodes)], np.int32)
    tokens = np.arange(100, 100 + nodes, dtype=np.int32)
    return DraftTree(tokens, parents, np.ones(nodes, np.float32), np.full(nodes, HEAD, np.uint8))


def paths(tree):
    """Of each node its tokens from below the root, and its estimate."""
    found = {}
    for node in range(len(tree)):
        path, at = [], node
        while at >= 0:
            path.append(int(tree.tokens[at]))
            at = tree.parents[at]
        found[tuple(path[::-1])] = float(tree.probs[node])
    return found


def test_a_chain_has_a_grade_a_level():
    (tree,) = trees_of(*links([chain([5, 6, 7])], 4))
    assert paths(tree) == pytest.approx({(5,): GRADES[0], (5, 6): GRADES[1], (5, 6, 7): GRADES[2]})
    assert (tree.sources == HEAD).all()


def test_trees_keep_their_shape():
    rng = np.random.default_rng(0)
    for width in (2, 5, 16):
        trees = [random_tree(rng, width - 1) for _ in range(8)]
        read = trees_of(*links(trees, width))
        for given, tree in zip(trees, read, strict=True):
            assert set(paths(tree)) == set(paths(given))
            assert (tree.parents < np.arange(len(tree))).all()
            above = np.append(tree.probs, 1.0)[tree.parents]
            assert (tree.probs <= above).all(), "an estimate is larger than its parent's"


class Retrieval(Sources):
    def __init__(self, trees):
        self.trees, self.asked = trees, 0

    def propose(self, batch, states, depths, wanted):
        self.asked += 1
        return self.trees if wanted else [EMPTY_TREE] * len(states)


class State:
    tenant = ""

    def __init__(self, *sources):
        self.sources = sources or ALL_SOURCES

    def takes_from(self, source):
        return source in self.sources


def beside(head, retrieved, nodes=7, children=7, states=None):
    states = states or [State() for _ in head]
    budget = Budget(nodes, nodes, children)
    source = BesideHead(lambda batch: head, Retrieval(retrieved), Acceptance().estimate, bool, budget, None)
    return source.propose(None, states, [nodes] * len(head), True)


def test_shared_beginnings_are_one():
    (tree,) = beside([chain([1, 2, 3])], [chain([1, 2, 9, 10], 2, [0.9, 0.8, 0.7, 0.6])])
    assert set(paths(tree)) == {(1,), (1, 2), (1, 2, 3), (1, 2, 9), (1, 2, 9, 10)}


def test_the_likeliest_are_kept():
    (tree,) = beside([chain([1, 2, 3])], [chain([8, 9], 2, [0.05, 0.04])], nodes=3)
    assert set(paths(tree)) == {(1,), (1, 2), (1, 2, 3)}


def test_one_side_may_have_nothing():
    assert set(paths(beside([chain([1])], [EMPTY_TREE])[0])) == {(1,)}
    assert set(paths(beside([EMPTY_TREE], [chain([1], 2)])[0])) == {(1,)}


def test_a_head_drafts_only_for_requests_that_take_its_drafts():
    states = [State(DraftSource.DATASTORE), State(DraftSource.HEAD)]
    trees = beside([chain([1]), chain([2])], [chain([8], 2), EMPTY_TREE], states=states)
    assert [set(paths(tree)) for tree in trees] == [{(8,)}, {(2,)}]


def test_where_chains_are_verified_the_union_is_one():
    head, retrieved = chain([1, 2, 3]), chain([1, 2, 9, 10], 2, [0.9, 0.8, 0.65, 0.65])
    (tree,) = beside([head], [retrieved], children=1)
    assert max(paths(tree), key=len) == (1, 2, 9, 10)  # the head's beginning, and retrieval's continuation
    assert len(tree) == 4


def test_a_step_in_which_no_draft_is_wanted_asks_neither():
    retrieval = Retrieval([chain([1], 2)])
    never = lambda batch: pytest.fail("the head drafts")  # noqa: E731
    source = BesideHead(never, retrieval, Acceptance().estimate, bool, Budget(7, 7, 7), None)
    assert source.propose(None, [State()], [7], False) == [EMPTY_TREE]
