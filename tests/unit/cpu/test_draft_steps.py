"""The forwards of SGLang's own draft model: each branch sees the cached text and its own tokens so far, and writes behind them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.cpu.attention import attend  # noqa: E402
from sglang_patches.cpu.draft_steps import CpuDraftSteps  # noqa: E402

HEADS, DIM, CONTEXT, STEPS = 2, 16, 48, 4
LENGTHS = [7, 30, 12]
REQUESTS = [2, 0, 1]


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


@pytest.fixture(params=[1, 2, 4])
def branches(request):
    return request.param


@pytest.fixture
def own(runner, branches):
    """Slots of each branch, [branches of all requests, STEPS]: those behind a request's text, branch after branch."""
    table = runner.req_to_token_pool.req_to_token
    behind = [
        table[row, length : length + branches * STEPS] for row, length in zip(REQUESTS, LENGTHS, strict=True)
    ]
    return torch.cat(behind).long().view(-1, STEPS)


@pytest.fixture
def steps(runner, branches, own):
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor(REQUESTS), seq_lens=torch.tensor(LENGTHS), out_cache_loc=own.flatten()
    )
    steps = CpuDraftSteps(runner, branches, STEPS)
    steps.init_forward_metadata(batch)
    assert len(steps.attn_backends) == STEPS - 1
    return steps.attn_backends


def test_each_step_sees_the_text_and_its_branch_so_far(runner, branches, own, steps):
    """Against a softmax over the slots of that many tokens, written out per branch."""
    slots = runner.token_to_kv_pool.size + 1
    keys, values = torch.randn(slots, HEADS, DIM), torch.randn(slots, HEADS, DIM)
    query = torch.randn(len(own), HEADS, DIM)
    for step, attention in enumerate(steps):
        (group,) = attention.plan
        found = attend(query, keys, values, group, 1.0).view(len(own), HEADS, DIM)
        for at in range(len(own)):
            row, length = REQUESTS[at // branches], LENGTHS[at // branches]
            text = runner.req_to_token_pool.req_to_token[row, :length].long()
            seen = torch.cat([text, own[at, : step + 1]])
            scores = torch.einsum("hd,khd->hk", query[at], keys[seen])
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
            torch.testing.assert_close(found[at], expected, atol=1e-5, rtol=1e-4)


def test_each_step_writes_behind_the_one_before(own, steps):
    written = torch.stack([attention.write_loc.loc for attention in steps], 1)
    assert written.tolist() == own[:, :-1].tolist()


def test_sglang_s_table_of_slots_stays(runner, own, steps):
    table = torch.manual_seed(1) and torch.randperm(len(LENGTHS) * CONTEXT) + 1
    assert runner.req_to_token_pool.req_to_token.flatten().tolist() == table.tolist()
