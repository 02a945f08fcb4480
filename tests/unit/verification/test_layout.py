"""The verification arrays against a slow, obvious oracle."""

import numpy as np
import pytest
import torch

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from sglang_patches.verification.layout import PADDING, full_mask, lay_out, pack, pack_reached


def _random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], dtype=np.int32)
    tokens = np.arange(nodes, dtype=np.int32) + 100
    return DraftTree(tokens, parents, np.full(nodes, 0.5, np.float32), np.ones(nodes, np.uint8))


def _ancestors(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


def _walk(layout, request: int, width: int) -> dict[int, list[int]]:
    """Children of each row as the sibling links give them."""
    children = {}
    for row in range(width):
        found, child = [], layout.next_token[request, row]
        while child != -1:
            found.append(int(child))
            child = layout.next_sibling[request, child]
        children[row] = found
    return children


def _depth_first(parents: list[int], node: int = -1) -> list[int]:
    children = [child for child, parent in enumerate(parents) if parent == node]
    return [row for child in children for row in (child, *_depth_first(parents, child))]


def _reordered(tree: DraftTree, nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the first nodes, depth first."""
    order = _depth_first(tree.parents[:nodes].tolist())
    place = {-1: -1} | {node: row for row, node in enumerate(order)}
    return tree.tokens[order].tolist(), [place[int(tree.parents[node])] for node in order]


def test_the_first_path_lies_in_consecutive_rows():
    #      root -> 0 -> 2 -> 4 ; root -> 1 -> 3
    parents = np.array([-1, -1, 0, 1, 2], np.int32)
    tree = DraftTree(np.arange(5, dtype=np.int32), parents, np.full(5, 0.5, np.float32), np.ones(5, np.uint8))
    assert pack([tree], 6)[0].tolist() == [[0, 2, 4, 1, 3], [-1, 0, 1, -1, 3]]


def test_the_probabilities_are_in_the_order_of_the_rows():
    tree = DraftTree(
        np.arange(3, dtype=np.int32),
        np.array([-1, -1, 0], np.int32),
        np.array([0.5, 0.4, 0.25], np.float32),
        np.ones(3, np.uint8),
    )
    assert np.allclose(pack_reached([tree, EMPTY_TREE], 5), [[0.5, 0.25, 0.4, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("width", [1, 2, 5, 16])
def test_matches_the_trees(width):
    rng = np.random.default_rng(width)
    trees = [_random_tree(rng, n) for n in (0, 1, width - 1, width + 3)]
    seq_lens = np.array([7, 1, 30, 4])
    packed = pack(trees, width)
    layout = lay_out(packed, np.array([1, 2, 3, 4]), seq_lens)
    for request, tree in enumerate(trees):
        nodes = min(len(tree), width - 1)
        tokens, parents = _reordered(tree, nodes)
        rows = layout.tokens.reshape(4, width)[request]
        assert rows[0] == request + 1
        assert rows[1 : nodes + 1].tolist() == tokens
        children = _walk(layout, request, width)
        for node in range(-1, nodes):
            assert children[node + 1] == [i + 1 for i in range(nodes) if parents[i] == node]
            lineage = _ancestors(parents, node)
            expected = {0} | {i + 1 for i in lineage}
            assert set(np.flatnonzero(layout.mask[request, node + 1])) == expected
            position = layout.positions.reshape(4, width)[request, node + 1]
            assert position == seq_lens[request] + len(lineage)


def test_padding_is_unreachable_and_attends_to_root_and_itself():
    layout = lay_out(pack([EMPTY_TREE], 4), np.array([9]), np.array([5]))
    assert layout.positions.tolist() == [5] * 4, "a position beyond the root's may be beyond the context"
    assert (layout.next_token == -1).all() and (layout.next_sibling == -1).all()
    for row in (1, 2, 3):
        assert set(np.flatnonzero(layout.mask[0, row])) == {0, row}
    assert (pack([EMPTY_TREE], 4)[0, 1] == PADDING).all()


@pytest.mark.parametrize("depth", [0, 1, 2, 5, 30])
def test_no_deeper_keeps_the_nodes_above(depth):
    tree = _random_tree(np.random.default_rng(depth), 30)
    parents = tree.parents.tolist()
    kept = [node for node in range(30) if len(_ancestors(parents, node)) <= depth]
    shallow = tree.no_deeper(depth)
    assert shallow.tokens.tolist() == [100 + node for node in kept]
    assert [-1 if p < 0 else kept[p] for p in shallow.parents] == [parents[node] for node in kept]
    assert [getattr(shallow, name).dtype for name in ("tokens", "parents")] == [np.int32] * 2
    shallow.check_integrity(depth=depth)


def test_full_mask_is_cached_tokens_then_tree():
    rng = np.random.default_rng(0)
    seq_lens, width = np.array([3, 8]), 4
    layout = lay_out(pack([_random_tree(rng, 3), _random_tree(rng, 2)], width), np.array([1, 2]), seq_lens)
    flat = full_mask(layout.mask, seq_lens, torch.device("cpu")).numpy()
    start = 0
    for request, seq_len in enumerate(seq_lens):
        rows = flat[start : start + width * (seq_len + width)].reshape(width, seq_len + width)
        assert rows[:, :seq_len].all()
        assert (rows[:, seq_len:] == layout.mask[request]).all()
        start += rows.size
    assert start == flat.size


def test_rows_of_each_request_are_its_own_nodes():
    rng = np.random.default_rng(8)
    trees, widths = [_random_tree(rng, size) for size in (4, 9, 0, 2)], np.array([5, 3, 1, 2])
    packed, roots, lengths = pack(trees, widths), np.arange(4), np.full(4, 7)
    layout, whole = lay_out(packed, roots, lengths, widths), lay_out(packed, roots, lengths)
    assert whole.uniform and not layout.uniform and layout.mask.shape == (4, 5, 5)
    assert whole.rows.tolist() == whole.rows_of_nodes.ravel().tolist() == list(range(20))
    own = [request * 5 + place for request, width in enumerate(widths) for place in range(width)]
    assert layout.rows.tolist() == own and layout.first_rows.tolist() == [0, 5, 8, 9]
    assert layout.rows_of_nodes.ravel()[own].tolist() == list(range(11))
    assert layout.rows_of_nodes[2].tolist() == [8] * 5, "a node without a row has one of its request's"
    for request, (tree, width) in enumerate(zip(trees, widths.tolist(), strict=True)):
        alone = pack([tree], width)[0]
        assert np.array_equal(packed[request, :, : width - 1], alone)
        assert (packed[request, 1, width - 1 :] == PADDING).all()
