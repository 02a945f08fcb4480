"""Tree building, link recovery and greedy verification against recursive oracles over random trees."""

import random

import pytest
import torch

from sglang_patches.cpu import tree_operators as ops


def _random_parents(n: int, rng: random.Random) -> list[int]:
    return [-1] + [rng.randrange(i) for i in range(1, n)]


def _ancestors(parents: list[int], node: int) -> list[int]:
    return [] if parents[node] < 0 else [*_ancestors(parents, parents[node]), parents[node]]


def _mask(parents: list[int]) -> torch.Tensor:
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, _ancestors(parents, node)] = True
    return mask


def _children(parents: list[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents) if parent == node]


def _links(parents: list[int]) -> tuple[list[int], list[int]]:
    first = [min(_children(parents, i), default=-1) for i in range(len(parents))]
    siblings = [
        min((j for j in _children(parents, parents[i]) if j > i), default=-1) if i else -1
        for i in range(len(parents))
    ]
    return first, siblings


def _tables(batch: int, n: int) -> list[torch.Tensor]:
    return [torch.full((batch, n), -1, dtype=torch.int64) for _ in range(3)]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("n", [1, 2, 9, 16])
def test_links_recovered_from_a_mask(batch, n):
    rng = random.Random(n * 10 + batch)
    trees = [_random_parents(n, rng) for _ in range(batch)]
    lengths = torch.tensor([rng.randrange(1, 50) for _ in trees])
    positions = torch.empty(batch * n, dtype=torch.int64)
    index, first, sibling = _tables(batch, n)
    mask = torch.stack([_mask(t) for t in trees]).flatten()
    ops.reconstruct_indices_from_tree_mask_cpu(mask, lengths, positions, index, first, sibling, batch, n)
    for b, parents in enumerate(trees):
        wanted_first, wanted_sibling = _links(parents)
        assert first[b].tolist() == wanted_first
        assert sibling[b].tolist() == wanted_sibling
        depths = [len(_ancestors(parents, i)) for i in range(n)]
        assert positions.view(batch, n)[b].tolist() == [int(lengths[b]) + d for d in depths]
    assert torch.equal(index.flatten(), torch.arange(batch * n))


def _accepted_path(parents, tokens, target, max_nodes) -> list[int]:
    path = [0]
    while len(path) < max_nodes:
        match = [c for c in _children(parents, path[-1]) if tokens[c] == target[path[-1]]]
        if not match:
            return path
        path.append(match[0])
    return path


@pytest.mark.parametrize("max_nodes", [2, 4, 12])
def test_greedy_verification_walks_the_path_the_target_agrees_with(max_nodes):
    rng = random.Random(max_nodes)
    batch, n = 6, 12
    trees = [_random_parents(n, rng) for _ in range(batch)]
    tokens = torch.randint(0, 3, (batch, n), generator=torch.Generator().manual_seed(3))
    target = torch.randint(0, 3, (batch, n), generator=torch.Generator().manual_seed(4))
    index = torch.arange(batch * n).view(batch, n)
    links = [torch.tensor(x) for x in zip(*(_links(t) for t in trees), strict=True)]
    predicts = torch.zeros(batch * n, dtype=torch.int32)
    accepted = torch.full((batch, max_nodes), -1, dtype=torch.int32)
    count = torch.zeros(batch, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(predicts, accepted, count, tokens, index, *links, target)
    lengths = set()
    for b, parents in enumerate(trees):
        path = _accepted_path(parents, tokens[b].tolist(), target[b].tolist(), max_nodes)
        lengths.add(len(path))
        assert accepted[b].tolist() == [b * n + i for i in path] + [-1] * (max_nodes - len(path))
        assert int(count[b]) == len(path) - 1
        assert [int(predicts[b * n + i]) for i in path] == [int(target[b, i]) for i in path]
    assert len(lengths) > 1, "the trees must not all end alike"


# A top-2 expansion of three steps: candidates are numbered level by level (0-1, 2-5, 6-9), `PARENT_LIST[c // 2]` is the
# candidate that group of two grew from. Selected: both roots, 2 and 3 under 0, 4 under 1, 8 under 3.
TOPK, DEPTH = 2, 3
PARENT_LIST = [-1, 0, 1, 2, 3]
SELECTED = [0, 1, 2, 3, 4, 8]
PARENTS = [-1, 0, 0, 1, 1, 2, 4]


@pytest.mark.parametrize("mode", [ops.QLEN_ONLY, ops.FULL_MASK])
def test_a_draft_expansion_becomes_its_tree(mode):
    n, lengths = len(PARENTS), [4, 1]
    prefixes = lengths if mode == ops.FULL_MASK else [0, 0]
    mask = torch.ones(sum(n * (p + n) for p in prefixes), dtype=torch.bool)
    positions = torch.empty(2 * n, dtype=torch.int64)
    index, first, sibling = _tables(2, n)
    ops.build_tree_kernel_efficient_cpu(
        torch.tensor([PARENT_LIST] * 2),
        torch.tensor([SELECTED] * 2),
        torch.tensor(lengths),
        mask,
        positions,
        index,
        first,
        sibling,
        TOPK,
        DEPTH,
        n,
        mode,
    )
    parts = mask.split([n * (p + n) for p in prefixes])
    for b, prefix in enumerate(prefixes):
        rows = parts[b].view(n, prefix + n)
        assert rows[:, :prefix].all()
        assert torch.equal(rows[:, prefix:], _mask(PARENTS))
        assert [first[b].tolist(), sibling[b].tolist()] == list(_links(PARENTS))
        depths = [len(_ancestors(PARENTS, i)) for i in range(n)]
        assert positions.view(2, n)[b].tolist() == [lengths[b] + d for d in depths]
    assert torch.equal(index.flatten(), torch.arange(2 * n))


def test_packed_masks_are_refused_by_name():
    table = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="tree_mask_mode 2"):
        ops.build_tree_kernel_efficient_cpu(*[table] * 8, 1, 1, 1, 2)
