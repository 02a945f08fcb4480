"""One tree of the draft and of what the target retrieves (Eq. 6)."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.union import Part, unions, whole_estimates
from sglang_patches.ledger.usage import DRAFT_MODEL
from sglang_patches.methods.double import Guidance, deepest_path

NODES = 6


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


def raw(trees, tenants=()):
    return np.concatenate([tree.probs for tree in trees]).astype(np.float64)


DRAFTED = tree_of([(5, -1, 0.8), (6, 0, 0.6), (7, 1, 0.4)], DRAFT_MODEL)


def union(*parts, nodes=NODES):
    trees = whole_estimates([parts])
    (tree,) = unions([parts], trees, raw(trees), nodes)
    tree.check_integrity(nodes=nodes)
    return tree


def test_where_the_draft_is_wrong_the_retrieval_goes_on():
    correction = tree_of([(5, -1, 0.7), (8, 0, 0.5), (9, 1, 0.45)])
    tree = union(Part(DRAFTED), Part(correction))
    assert list(paths(tree)) == [(5,), (5, 6), (5, 8), (5, 8, 9), (5, 6, 7)]
    assert paths(tree)[5,] == (0.8, DRAFT_MODEL) and paths(tree)[5, 8] == (0.5, 3)


def test_behind_the_draft_the_retrieval_goes_on():
    extension = tree_of([(1, -1, 0.5), (2, 0, 0.25)])
    tree = union(Part(DRAFTED), Part(EMPTY_TREE), Part(extension, 2))
    assert list(paths(tree)) == [(5,), (5, 6), (5, 6, 7), (5, 6, 7, 1), (5, 6, 7, 1, 2)]
    assert paths(tree)[5, 6, 7, 1] == (0.2, 3) and paths(tree)[5, 6, 7, 1, 2] == (0.1, 3)


def test_the_path_to_the_deepest_node():
    branching = tree_of([(5, -1, 0.8), (6, -1, 0.7), (7, 1, 0.6), (8, 0, 0.5), (9, 2, 0.4)])
    assert deepest_path(branching).tolist() == [1, 2, 4]
    assert deepest_path(DRAFTED).tolist() == [0, 1, 2] and deepest_path(EMPTY_TREE).tolist() == []


@st.composite
def trees(draw):
    rows = []
    for at in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, at - 1))
        above = rows[parent][2] if parent >= 0 else 1.0
        rows.append((draw(st.integers(0, 3)), parent, above * draw(st.floats(0.1, 1.0))))
    kept, place, seen = [], {-1: -1}, set()
    for at, (token, parent, estimate) in enumerate(rows):
        if parent in place and (place[parent], token) not in seen:
            seen.add((place[parent], token))
            place[at] = len(kept)
            kept.append((token, place[parent], estimate))
    return tree_of(kept, draw(st.sampled_from([1, 2, 3, DRAFT_MODEL])))


@given(st.lists(st.lists(trees(), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 12))
def test_a_union_has_the_likeliest_paths_of_its_trees(requests, nodes):
    parts = [[Part(tree) for tree in of] for of in requests]
    whole = whole_estimates(parts)
    for of, tree in zip(requests, unions(parts, whole, raw(whole), nodes), strict=True):
        tree.check_integrity(nodes=nodes)
        best = {}
        for one in of:
            for path, (estimate, _) in paths(one).items():
                best[path] = max(best.get(path, 0.0), estimate.expected)
        found = paths(tree)
        assert len(tree) == min(nodes, len(best)) and set(found) <= set(best)
        least = min((best[path] for path in found), default=0.0)
        left_out = [best[path] for path in best if path not in found and path[:-1] in {*found, ()}]
        assert all(estimate <= least + 1e-6 for estimate in left_out)


def test_no_child_is_likelier_than_its_parent_whosever_they_are():
    """By what was seen, the first tree's node is likelier than the second one's, whatever they say of themselves."""
    parts = [Part(tree_of([(5, -1, 0.3)], source=1)), Part(tree_of([(5, -1, 0.9), (6, 0, 0.8)]))]
    (tree,) = unions([parts], whole_estimates([parts]), np.array([0.95, 0.9, 0.8]), NODES)
    tree.check_integrity(nodes=NODES)
    assert paths(tree) == {(5,): (0.3, 1), (5, 6): (0.3, 3)}


class Feed:
    """Answers as a datastore does that knows one continuation of the text, and one of the draft."""

    def __init__(self, text, draft):
        self.text, self.draft, self.asked = text, draft, []

    def ask(self, states, budgets, queries):
        self.asked += [[query.tokens.tolist() for query in of] for of in queries]
        return [(self.text, (self.draft,) * len(of)) for of in queries]


def test_the_end_of_the_draft_is_asked_about():
    feed = Feed(tree_of([(9, -1, 0.3)]), tree_of([(1, -1, 0.9)]))
    states = [SimpleNamespace(tenant="a"), SimpleNamespace(tenant="b")]
    guidance = Guidance(feed, Budget(NODES), raw)
    drafted, missed = guidance.trees(states, [DRAFTED, EMPTY_TREE])
    assert feed.asked == [[[5, 6, 7]], []]
    assert set(paths(drafted)) == {(5,), (5, 6), (5, 6, 7), (5, 6, 7, 1), (9,)}
    assert missed is feed.text


def test_a_union_is_made_by_its_tenant_s_experience():
    feed = Feed(tree_of([(9, -1, 0.3)]), tree_of([(1, -1, 0.9)]))
    told = []

    def estimate(trees, tenants):
        told.append(list(zip([len(tree) for tree in trees], tenants, strict=True)))
        return raw(trees)

    states = [SimpleNamespace(tenant=name) for name in "abc"]
    Guidance(feed, Budget(NODES), estimate).trees(states, [DRAFTED, EMPTY_TREE, DRAFTED])
    (asked,) = told
    assert {tenant for _, tenant in asked} == {"a", "c"}
    assert [size for size, tenant in asked if tenant == "a"] == [
        size for size, tenant in asked if tenant == "c"
    ]


def test_a_datastore_that_does_not_answer_leaves_the_draft():
    class Silent:
        def ask(self, states, budgets, queries):
            return [(EMPTY_TREE, ())] * len(states)

    (tree,) = Guidance(Silent(), Budget(NODES), raw).trees([SimpleNamespace(tenant="")], [DRAFTED])
    assert paths(tree) == paths(DRAFTED)
