"""Slot bookkeeping against the obvious slicing, for ragged batches and page boundaries."""

import numpy as np
import pytest
import torch

from sglang_patches.cpu import cache_operators as ops

CONTEXT = 40


def _table(requests: int = 6) -> torch.Tensor:
    """A slot table in which every cell differs."""
    return torch.randperm(requests * CONTEXT, dtype=torch.int32).view(requests, CONTEXT)


def _ranges(table, requests, starts, ends):
    return torch.cat([table[r, s:e] for r, s, e in zip(requests, starts, ends, strict=True)]).long()


# Empty, single, page-crossing (16) and row-filling ranges together.
RAGGED = [(4, 0, 0), (1, 7, 8), (0, 15, 33), (5, 0, CONTEXT)]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_extend_locations_are_the_ranges_one_after_another(index):
    table = _table()
    requests, starts, ends = (torch.tensor(column) for column in zip(*RAGGED, strict=True))
    expected = _ranges(table, requests, starts, ends)
    out = torch.full((len(expected) + 3,), -7)
    ops.assign_extend_cache_locs_cpu(requests, table, starts.to(index), ends.to(index), out, CONTEXT)
    assert torch.equal(out[: len(expected)], expected)
    assert out[len(expected) :].tolist() == [-7] * 3


def test_draft_locations_follow_each_sequence():
    table = _table()
    requests, lengths = torch.tensor([3, 0]), torch.tensor([0, 15])
    out = torch.zeros(12, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(requests, table, lengths, out, CONTEXT, 2, 3)
    assert torch.equal(out, _ranges(table, requests, lengths, lengths + 6))


def test_assigned_slots_are_written_and_nothing_else():
    table = _table()
    expected = table.clone()
    requests, starts, ends = (torch.tensor(column) for column in zip(*RAGGED, strict=True))
    slots = torch.arange(1000, 1000 + int((ends - starts).sum()))
    at = 0
    for r, s, e in RAGGED:
        expected[r, s:e] = slots[at : at + e - s].int()
        at += e - s
    ops.assign_req_to_token_pool_cpu(requests, table, starts, ends, slots, CONTEXT)
    assert torch.equal(table, expected)


@pytest.mark.parametrize(
    ("request_index", "end", "room", "named"),
    [(6, 3, 9, "req_pool_indices"), (0, CONTEXT + 1, 99, "end_offset"), (0, 3, 2, "out_cache_loc")],
)
def test_a_range_outside_its_table_is_named(request_index, end, room, named):
    with pytest.raises(IndexError, match=named):
        ops.assign_extend_cache_locs_cpu(
            torch.tensor([request_index]),
            _table(),
            torch.tensor([0]),
            torch.tensor([end]),
            torch.zeros(room, dtype=torch.int64),
            CONTEXT,
        )


def test_accepted_slots_are_packed_to_the_front():
    slots = torch.arange(100, 112)
    accept_index = torch.tensor([[0, 3, -1, -1], [4, -1, -1, -1], [8, 9, 11, -1]], dtype=torch.int32)
    out = torch.zeros(12, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(accept_index, slots, out)
    assert out.tolist() == [100, 103, 104, 108, 109, 111] + [0] * 6


def test_bonus_token_is_the_last_accepted():
    tokens = torch.arange(12, dtype=torch.int32)
    out = torch.zeros(3, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), out, 4)
    assert out.tolist() == [0, 7, 9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kv_rows_move_in_every_buffer_even_when_ranges_overlap(dtype):
    buffers = [torch.randn(32, 3, 8).to(dtype) for _ in range(4)] + [torch.randn(32, 5).to(dtype)]
    target, source = torch.tensor([1, 2, 3, 0, 0]), torch.tensor([2, 3, 31, 0, 0])
    expected = [buffer.clone() for buffer in buffers]
    for buffer, before in zip(expected, buffers, strict=True):
        buffer[target] = before[source]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([int(np.prod(b.shape[1:])) * b.element_size() for b in buffers])
    ops.copy_all_layer_kv_cache_cpu(addresses, strides, target, source)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, wanted)


def test_kv_copy_refuses_bad_slots():
    with pytest.raises(ValueError, match="tgt_loc has 1"):
        ops.copy_all_layer_kv_cache_cpu(
            torch.tensor([0], dtype=torch.uint64), torch.tensor([4]), torch.tensor([1]), torch.tensor([1, 2])
        )
    with pytest.raises(IndexError, match="negative"):
        ops.copy_all_layer_kv_cache_cpu(
            torch.tensor([0], dtype=torch.uint64), torch.tensor([4]), torch.tensor([-1]), torch.tensor([1])
        )


@pytest.mark.parametrize("select", [None, torch.tensor([1, 5])])
def test_input_ids_rotate_within_their_segment(select):
    ids = torch.arange(10, 18)
    expected = ids.clone()
    for i, (start, length, token) in enumerate([(0, 3, 90), (3, 5, 91)]):
        expected[start : start + length - 1] = ids[start + 1 : start + length]
        expected[start + length - 1 if select is None else select[i]] = token
    ops.rotate_input_ids_cpu(
        ids, torch.tensor([0, 3]), torch.tensor([3, 5]), torch.tensor([[90], [91]]), select
    )
    assert torch.equal(ids, expected)
