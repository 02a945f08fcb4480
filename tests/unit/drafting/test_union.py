"""A request's tree is the best of what its sources propose (DOUBLE's Eq. 6 has two of them)."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore_service.protocol.tree import EMPTY_TREE
from datastore_service.protocol.types import Budget
from sglang_patches.drafting.union import Part, best_trees, unions, whole_estimates
from sglang_patches.ledger.usage import DRAFT_MODEL
from sglang_patches.step.acceptance import Acceptance
from tests.unit.drafting.trees import paths, tree_of

NODES = 6
BUDGET = Budget(NODES, children=NODES)


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


def test_a_tree_that_is_alone_stays_as_it_is():
    retrieved = tree_of([(5, -1, 0.3)])
    pairs = [(DRAFTED, EMPTY_TREE), (EMPTY_TREE, retrieved), (EMPTY_TREE, EMPTY_TREE)]
    parts = [[Part(tree) for tree in pair] for pair in pairs]
    made = best_trees(parts, [""] * 3, raw, BUDGET)
    assert list(map(id, made)) == list(map(id, [DRAFTED, retrieved, EMPTY_TREE]))
    assert best_trees([[]], [""], raw, BUDGET) == [EMPTY_TREE]


@given(st.lists(st.lists(trees(), max_size=3), min_size=1, max_size=3), st.integers(1, 12))
def test_a_target_that_verifies_chains_only_gets_chains(requests, nodes):
    parts = [[Part(tree) for tree in of] for of in requests]
    for of, tree in zip(
        requests, best_trees(parts, [""] * len(parts), raw, Budget(nodes, children=1)), strict=True
    ):
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
        assert (len(tree) > 0) is any(map(len, of))


def test_each_tenant_s_own_experience_chooses():
    acceptance = Acceptance()
    drafted, retrieved = tree_of([(5, -1, 0.5)], DRAFT_MODEL), tree_of([(6, -1, 0.5)], 1)
    for tenant, right in ("a", DRAFT_MODEL), ("b", 1):
        for one in drafted, retrieved:
            accepted = np.array([one.sources[0] == right])
            request = SimpleNamespace(tenant=tenant)
            acceptance.learn([SimpleNamespace(request=request, tree=one, accepted=accepted)] * 99)
    parts = [[Part(drafted), Part(retrieved)]] * 3
    made = best_trees(parts, ["a", "b", "a"], acceptance.estimate, Budget(1, children=1))
    assert [tree.tokens.tolist() for tree in made] == [[5], [6], [5]]


def test_the_estimates_of_a_batch_are_those_of_its_trees():
    rng, acceptance = np.random.default_rng(0), Acceptance()
    given = [
        tree_of([(at, at - 1, float(p)) for at, p in enumerate(rng.random(size))], 1 + size % 3)
        for size in (1, 4, 2, 7)
    ]
    tenants = ["a", "b", "a", "c"]
    for tree, name in zip(given, tenants, strict=True):
        request = SimpleNamespace(tenant=name)
        outcome = SimpleNamespace(request=request, tree=tree, accepted=rng.random(len(tree)) < 0.5)
        acceptance.learn([outcome] * 9)
    expected = [acceptance.estimate([tree], [name]) for tree, name in zip(given, tenants, strict=True)]
    assert acceptance.estimate(given, tenants) == pytest.approx(np.concatenate(expected))
