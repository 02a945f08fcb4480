"""The attention plan and kernel against dense attention written out per query row."""

import math

import pytest
import torch

from sglang_patches.cpu.attention import attend, plan_step

CONTEXT, DIM = 700, 16


class Cache:
    """KV buffers and a slot table in which requests' slots are scattered (or consecutive)."""

    def __init__(self, requests: int, heads: int, consecutive: bool = False):
        torch.manual_seed(requests * 100 + heads)
        size = requests * CONTEXT + 1
        order = torch.arange(1, size) if consecutive else torch.randperm(size - 1) + 1
        self.table = order.view(requests, CONTEXT).int()
        self.keys, self.values = torch.randn(size, heads, DIM), torch.randn(size, heads, DIM)
        # Slot 0 is padding: were it read, results would show it.
        self.keys[0], self.values[0] = 50.0, 1e6


def _run(cache, query, plan, **layer):
    out = torch.zeros(query.shape[0], query.shape[1] * DIM, dtype=query.dtype)
    for group in plan:
        own = query if group.query_rows is None else query[group.query_rows]
        group.place(out, attend(own, cache.keys, cache.values, group, DIM**-0.5, **layer))
    return out.view(query.shape)


def _dense_row(cache, request, query, seen, cap=0.0):
    """One query row [heads, d] over the key positions `seen`, head by head."""
    slots = cache.table[request, seen].long()
    share = query.shape[0] // cache.keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        scores = cache.keys[slots, head // share] @ query[head] / math.sqrt(DIM)
        if cap:
            scores = cap * torch.tanh(scores / cap)
        out.append(torch.softmax(scores, 0) @ cache.values[slots, head // share])
    return torch.stack(out)


def _dense_causal(cache, requests, prefixes, rows, query, window=-1, cap=0.0):
    out, at = [], 0
    for request, prefix, count in zip(requests.tolist(), prefixes, rows, strict=True):
        for i in range(count):
            first = 0 if window < 0 else max(0, prefix + i - window)
            out.append(_dense_row(cache, request, query[at], torch.arange(first, prefix + i + 1), cap))
            at += 1
    return torch.stack(out)


def _positions(prefixes, rows):
    return torch.cat([torch.arange(p, p + r) for p, r in zip(prefixes, rows, strict=True)])


HEADS = pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
LAYERS = pytest.mark.parametrize("layer", [{}, {"window": 5}, {"cap": 2.0}, {"window": 300, "cap": 5.0}])


@HEADS
@LAYERS
@pytest.mark.parametrize(
    ("prefixes", "rows"),
    [([0], [7]), ([0], [40]), ([9], [3]), ([30], [50]), ([0, 12, 300], [5, 1, 33]), ([4, 0], [0, 6])],
)
def test_prefill_with_cached_prefix(query_heads, kv_heads, layer, prefixes, rows):
    cache = Cache(len(rows) + 1, kv_heads)
    requests = torch.arange(len(rows), 0, -1)
    query = torch.randn(sum(rows), query_heads, DIM)
    plan = plan_step(cache.table, requests, prefixes, rows, _positions(prefixes, rows))
    got = _run(cache, query, plan, **layer)
    torch.testing.assert_close(
        got, _dense_causal(cache, requests, prefixes, rows, query, **layer), atol=2e-5, rtol=1e-4
    )


@HEADS
@LAYERS
@pytest.mark.parametrize("lengths", [[1], [300], [17, 17], [1, 16, 250, 699, 310]])
@pytest.mark.parametrize("consecutive", [False, True])
def test_decode_of_mixed_lengths(query_heads, kv_heads, layer, lengths, consecutive):
    cache = Cache(len(lengths), kv_heads, consecutive)
    requests, prefixes = torch.arange(len(lengths)), [n - 1 for n in lengths]
    query = torch.randn(len(lengths), query_heads, DIM)
    room = len(cache.keys) if consecutive else 0
    plan = plan_step(cache.table, requests, prefixes, 1, torch.tensor(prefixes), slot_count=room)
    want = _dense_causal(cache, requests, prefixes, [1] * len(lengths), query, **layer)
    torch.testing.assert_close(_run(cache, query, plan, **layer), want, atol=2e-5, rtol=1e-4)


# A chain, a bush, and two branches of depth two; parents come first.
TREES = [[-1, 0, 1, 2, 3], [-1, 0, 0, 0, 0], [-1, 0, 0, 1, 2]]
ROWS = 5


def _tree_masks(trees):
    mask = torch.eye(ROWS, dtype=torch.bool).repeat(len(trees), 1, 1)
    for tree, rows in zip(trees, mask, strict=True):
        for node in range(1, ROWS):
            rows[node] |= rows[tree[node]]
    return mask


def _dense_tree(cache, prefixes, masks, depths, query, window, cap):
    out = []
    for request, prefix in enumerate(prefixes):
        for i in range(ROWS):
            keys = torch.arange(prefix + ROWS)
            at = torch.cat([torch.arange(prefix), prefix + depths[request]])
            seen = torch.cat([torch.ones(prefix, dtype=torch.bool), masks[request, i]])
            if window >= 0:
                seen &= prefix + depths[request, i] - at <= window
            out.append(_dense_row(cache, request, query[request * ROWS + i], keys[seen], cap))
    return torch.stack(out)


@HEADS
@LAYERS
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("prefixes", [[11], [300, 4, 690], [0, 255, 256]])
def test_verification_of_trees(query_heads, kv_heads, layer, full, prefixes):
    cache = Cache(len(prefixes), kv_heads)
    masks = _tree_masks((TREES * 2)[: len(prefixes)])
    depths = masks.sum(-1) - 1
    custom = masks.flatten()
    if full:
        prefix_cells = [torch.ones(ROWS, p, dtype=torch.bool) for p in prefixes]
        custom = torch.cat([torch.cat(x, 1).flatten() for x in zip(prefix_cells, masks, strict=True)])
    query = torch.randn(len(prefixes) * ROWS, query_heads, DIM)
    positions = (torch.tensor(prefixes).unsqueeze(1) + depths).flatten()
    plan = plan_step(cache.table, torch.arange(len(prefixes)), prefixes, ROWS, positions, custom)
    want = _dense_tree(cache, prefixes, masks, depths, query, layer.get("window", -1), layer.get("cap", 0.0))
    torch.testing.assert_close(_run(cache, query, plan, **layer), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefixes", [[11, 40, 7], [300, 4, 690]])
@pytest.mark.parametrize("widths", [[5, 1, 3], [1, 1, 4], [2, 2, 2]])
def test_rows_by_request_are_those_of_a_step_in_which_all_have_as_many(dtype, prefixes, widths):
    """Bit for bit: what a request's rows are does not depend on the rows that others have."""
    cache = Cache(3, 2)
    cache.keys, cache.values = cache.keys.to(dtype), cache.values.to(dtype)
    query = torch.randn(3 * ROWS, 6, DIM).to(dtype)
    mask, depths = _tree_masks(TREES), torch.tensor([[0, 1, 2, 3, 4], [0, 1, 1, 1, 1], [0, 1, 1, 2, 3]])
    positions = (torch.tensor(prefixes).unsqueeze(1) + depths).flatten()
    requests = torch.arange(3)
    whole = _run(cache, query, plan_step(cache.table, requests, prefixes, ROWS, positions, mask.flatten()))
    kept = (torch.arange(ROWS) < torch.tensor(widths).unsqueeze(1)).flatten()
    plan = plan_step(cache.table, requests, prefixes, ROWS, positions[kept], mask.flatten(), widths=widths)
    assert torch.equal(_run(cache, query[kept], plan), whole[kept])


def test_lengths_far_apart_are_not_padded_to_the_longest():
    cache = Cache(3, 1)
    plan = plan_step(cache.table, torch.arange(3), [5, 690, 200], 1, torch.tensor([5, 690, 200]))
    assert sorted((g.batch, g.key_positions.shape[1]) for g in plan) == [(1, 704), (2, 224)]


class BfloatCache(Cache):
    """The demo model's shapes: nine query heads on three KV heads of 64."""

    def __init__(self):
        super().__init__(4, 3)
        self.keys, self.values = (
            torch.randn(len(self.table.flatten()) + 1, 3, 64).bfloat16() for _ in range(2)
        )

    def attend(self, requests, prefixes, query, mask):
        rows = query.shape[1]
        positions = (torch.tensor(prefixes).unsqueeze(1) + mask.sum(-1) - 1).flatten()
        plan = plan_step(self.table, torch.tensor(requests), prefixes, rows, positions, mask.flatten())
        out = torch.zeros(len(requests) * rows, 9 * 64, dtype=torch.bfloat16)
        for group in plan:
            chosen = slice(None) if group.query_rows is None else group.query_rows
            out[chosen] = attend(query.flatten(0, 1)[chosen], self.keys, self.values, group, 0.125)
        return out.view(len(requests), rows, -1)


@pytest.mark.parametrize("prefix", [1, 37, 300, 511, 512, 650])
def test_a_bfloat16_row_is_the_same_alone_in_a_chain_and_in_a_batch(prefix):
    cache, width = BfloatCache(), 16
    query = torch.randn(1, width, 9, 64).bfloat16()
    chain = torch.ones(width, width, dtype=torch.bool).tril().unsqueeze(0)
    whole = cache.attend([0], [prefix], query, chain)
    for rows in range(1, width):
        got = cache.attend([0], [prefix], query[:, :rows], chain[:, :rows, :rows])
        assert torch.equal(got, whole[:, :rows]), rows
    others = torch.cat([query[:, :3], torch.randn(3, 3, 9, 64).bfloat16()])
    batch = cache.attend(range(4), [prefix, 20, 680, 255], others, chain[:, :3, :3].repeat(4, 1, 1))
    assert torch.equal(batch[:1], whole[:, :3])


def test_a_mask_of_the_wrong_size_is_named():
    cache = Cache(1, 1)
    with pytest.raises(ValueError, match="custom_mask has 24 cells"):
        plan_step(cache.table, torch.arange(1), [9], 5, torch.arange(5), torch.ones(24, dtype=torch.bool))
