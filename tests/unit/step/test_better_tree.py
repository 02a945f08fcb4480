"""Of two trees for a request the worker takes the one of which more nodes are likely to be accepted."""

from types import SimpleNamespace

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from sglang_patches.ledger.usage import DRAFT_MODEL
from sglang_patches.step.acceptance import Acceptance


def tree(probs, source=1):
    size = len(probs)
    rows = np.arange(size, dtype=np.int32)
    return DraftTree(rows, rows - 1, np.array(probs, np.float32), np.full(size, source, np.uint8))


def test_the_estimates_of_a_batch_are_those_of_its_trees():
    rng, acceptance = np.random.default_rng(0), Acceptance()
    trees = [tree(rng.random(size), 1 + size % 3) for size in (1, 4, 2, 7)]
    tenants = ["a", "b", "a", "c"]
    for at, of in enumerate(trees):
        outcome = SimpleNamespace(
            request=SimpleNamespace(tenant=tenants[at]), tree=of, accepted=rng.random(len(of)) < 0.5
        )
        acceptance.learn([outcome] * 9)
    expected = [acceptance.estimate([of], [name]).sum() for of, name in zip(trees, tenants, strict=True)]
    assert acceptance.expected(trees, tenants) == pytest.approx(expected)


def test_the_better_tree_is_taken():
    good, bad, none = tree([0.9, 0.8], DRAFT_MODEL), tree([0.3]), EMPTY_TREE
    pairs = [(good, bad), (bad, good), (none, bad), (bad, none), (none, none), (good, good)]
    trees, others = zip(*pairs, strict=True)
    taken = Acceptance().better(trees, others, [""] * len(pairs))
    assert list(map(id, taken)) == list(map(id, [good, good, bad, bad, none, good]))
    assert Acceptance().better([none], [bad], [""]) == [bad]


def test_of_two_trees_each_tenant_s_own_experience_chooses():
    acceptance, pair = Acceptance(), (tree([0.5], DRAFT_MODEL), tree([0.5], 1))
    for tenant, right in ("a", DRAFT_MODEL), ("b", 1):
        for one in pair:
            request = SimpleNamespace(tenant=tenant)
            accepted = np.array([one.sources[0] == right])
            acceptance.learn([SimpleNamespace(request=request, tree=one, accepted=accepted)] * 99)
    drafted, retrieved = pair
    for tenants in ("a", "b"), ("b", "a"):
        taken = acceptance.better([drafted, drafted], [retrieved, retrieved], tenants)
        assert [one.sources[0] == DRAFT_MODEL for one in taken] == [tenant == "a" for tenant in tenants]
