"""SGLang's own walk over our links, and its own reading of our mask: the source its CUDA kernels are built from."""

import numpy as np
import pytest
import torch

from tests.unit.accelerator.cuda_source import CudaSource
from tests.unit.accelerator.trees import WIDTHS, forest, random_tree, verification


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return CudaSource(tmp_path_factory.mktemp("cuda"))


def accepted(source, v, target, next_sibling=None):
    """(accepted rows, their target tokens) of each request."""
    batch, width = v.batch_size, v.width
    predicts = torch.zeros(batch * width, dtype=torch.int32)
    index = torch.full((batch, width), -1, dtype=torch.int32)
    count = torch.empty(batch, dtype=torch.int32)
    source.verify_tree_greedy(
        predicts=predicts,
        accept_index=index,
        accept_token_num=count,
        candidates=torch.from_numpy(v.layout.tokens).view(batch, width),
        retrive_index=torch.from_numpy(v.layout.retrieve_index),
        retrive_next_token=torch.from_numpy(v.layout.next_token),
        retrive_next_sibling=torch.from_numpy(
            v.layout.next_sibling if next_sibling is None else next_sibling
        ),
        target_predict=torch.from_numpy(target),
    )
    assert (index >= 0).sum(1).tolist() == (count + 1).tolist()
    rows = [row[: n + 1] for row, n in zip(index.tolist(), count.tolist(), strict=True)]
    return [([i - b * width for i in path], predicts[path].tolist()) for b, path in enumerate(rows)]


@pytest.mark.parametrize("width", WIDTHS)
def test_accepts_the_path_the_target_takes(source, width):
    rng = np.random.default_rng(width)
    lengths = []
    for seed in range(20):
        v = verification(forest(width, seed), width)
        target = v.likely_tokens(rng)
        for request, (rows, tokens) in enumerate(accepted(source, v, target)):
            assert rows == v.walk(request, target[request])
            assert tokens == target[request][rows].tolist()
            lengths.append(len(rows))
    assert width == 1 or max(lengths) > 1


def test_a_lost_link_is_a_lost_branch(source):
    v = verification([random_tree(np.random.default_rng(0), 7, "star")], 8)
    tokens = v.layout.tokens.reshape(1, 8)
    target = np.full((1, 8), tokens[0, 5])
    assert accepted(source, v, target)[0][0] == [0, 5]
    assert accepted(source, v, target, np.full_like(v.layout.next_sibling, -1))[0][0] == [0]


def test_padding_is_never_accepted(source):
    v = verification(forest(8)[-1:], 8)
    assert accepted(source, v, np.zeros((1, 8), np.int64)) == [([0], [0])]  # 0 is the padding's token


@pytest.mark.parametrize("width", WIDTHS)
def test_our_links_are_those_sglang_reads_off_our_mask(source, width):
    """Of trees without padding: SGLang's n-gram trees have none, it would take ours for children of the root."""
    rng = np.random.default_rng(width)
    trees = [random_tree(rng, width - 1, shape) for shape in ("random", "chain", "star", "random")]
    v = verification(trees, width)
    positions, next_token, next_sibling = source.reconstruct(v.layout.mask, v.seq_lens)
    np.testing.assert_array_equal(positions.reshape(-1), v.layout.positions)
    np.testing.assert_array_equal(next_token, v.layout.next_token)
    np.testing.assert_array_equal(next_sibling, v.layout.next_sibling)
