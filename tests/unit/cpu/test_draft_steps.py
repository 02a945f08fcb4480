"""The forwards of SGLang's own draft model: each sees the cached text and the chain so far, and writes behind it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.cpu.attention import attend  # noqa: E402
from sglang_patches.cpu.draft_steps import CpuDraftSteps  # noqa: E402

HEADS, DIM, CONTEXT, STEPS = 2, 16, 40, 4
LENGTHS = [7, 30, 12]


@pytest.fixture
def runner():
    torch.manual_seed(1)
    slots = torch.randperm(len(LENGTHS) * CONTEXT) + 1
    return SimpleNamespace(
        use_mla_backend=False,
        kv_cache_dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=slots.view(-1, CONTEXT).int()),
        token_to_kv_pool=SimpleNamespace(size=len(slots), page_size=1),
    )


@pytest.fixture
def batch(runner):
    requests = torch.tensor([2, 0, 1])
    table = runner.req_to_token_pool.req_to_token
    own = [
        table[row, length : length + STEPS] for row, length in zip(requests.tolist(), LENGTHS, strict=True)
    ]
    return SimpleNamespace(
        req_pool_indices=requests, seq_lens=torch.tensor(LENGTHS), out_cache_loc=torch.cat(own).long()
    )


def test_each_step_sees_the_text_and_the_chain_so_far(runner, batch):
    """Against a softmax over the slots of that many tokens, written out per request."""
    slots = runner.token_to_kv_pool.size + 1
    keys, values = torch.randn(slots, HEADS, DIM), torch.randn(slots, HEADS, DIM)
    query = torch.randn(len(LENGTHS), HEADS, DIM)
    steps = CpuDraftSteps(runner, 1, STEPS)
    steps.init_forward_metadata(batch)
    assert len(steps.attn_backends) == STEPS - 1
    for step, attention in enumerate(steps.attn_backends):
        (group,) = attention.plan
        found = attend(query, keys, values, group, 1.0).view(len(LENGTHS), HEADS, DIM)
        for at, (row, length) in enumerate(zip(batch.req_pool_indices, LENGTHS, strict=True)):
            seen = runner.req_to_token_pool.req_to_token[row, : length + step + 1].long()
            scores = torch.einsum("hd,khd->hk", query[at], keys[seen])
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
            torch.testing.assert_close(found[at], expected, atol=1e-5, rtol=1e-4)


def test_each_step_writes_behind_the_one_before(runner, batch):
    steps = CpuDraftSteps(runner, 1, STEPS)
    steps.init_forward_metadata(batch)
    written = torch.stack([attention.write_loc.loc for attention in steps.attn_backends], 1)
    assert written.tolist() == batch.out_cache_loc.view(-1, STEPS)[:, :-1].tolist()


def test_trees_are_refused_by_the_flag(runner):
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1, not 4"):
        CpuDraftSteps(runner, 4, STEPS)
