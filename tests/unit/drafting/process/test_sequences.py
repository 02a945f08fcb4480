"""Rows of the draft model's table, over an allocator that notes what is taken and given back."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.drafting.process.sequences import SequenceCache  # noqa: E402

ROWS, COLUMNS, SLOTS, SCRATCH = 9, 40, 120, 4


class Allocator:
    """Slots 1 to SLOTS; raises ValueError for one that is given back twice."""

    def __init__(self) -> None:
        self.free_slots = list(range(1, SLOTS + 1))

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        if set(slots.tolist()) & set(self.free_slots):
            raise ValueError(f"{slots} are free")
        self.free_slots += slots.tolist()


@pytest.fixture
def allocator() -> Allocator:
    return Allocator()


@pytest.fixture
def sequences(allocator) -> SequenceCache:
    table = torch.full((ROWS, COLUMNS), -1, dtype=torch.int32)
    pool = SimpleNamespace(req_to_token=table)
    return SequenceCache(
        SimpleNamespace(req_to_token_pool=pool, token_to_kv_pool_allocator=allocator), SCRATCH
    )


def grown(sequences, draft, lengths):
    """A session that grew in steps of these lengths, and its slots."""
    cached, text = sequences.begin(draft), []
    for length in lengths:
        slots = sequences.take(length, {draft}).tolist()
        sequences.extend(cached, slots)
        text += slots
    return cached, text


def test_a_text_has_its_slots_in_order_and_knows_the_last(sequences):
    cached, text = grown(sequences, "a", [5, 1, 3])
    assert sequences.table[cached.row, : cached.length].tolist() == text
    assert (cached.length, cached.last) == (9, text[-1])
    sequences.extend(cached, [])
    assert (cached.length, cached.last) == (9, text[-1])


def test_branches_of_several_sessions_are_laid_out_at_once(sequences):
    (first, one), (second, two) = grown(sequences, "a", [12]), grown(sequences, "b", [3])
    branches = [(first, [101, 102]), (second, [103]), (first, [101, 104, 105]), (second, [106, 107])]
    rows = sequences.lay_out(branches)
    assert len(set(rows)) == 4 and not {first.row, second.row} & set(rows)
    for row, (cached, path) in zip(rows, branches, strict=True):
        text = one if cached is first else two
        assert sequences.table[row, : len(text) + len(path)].tolist() == text + path
    assert sequences.table[first.row, :12].tolist() == one and sequences.table[second.row, :3].tolist() == two


def test_no_branch_needs_no_row(sequences):
    assert sequences.lay_out([]) == []


def test_every_slot_comes_back(sequences, allocator):
    draw = random.Random(0)
    for turn in range(20):
        cached, _ = grown(sequences, turn, [draw.randint(1, 9) for _ in range(3)])
        cached.nodes.update(enumerate(sequences.take(6, {turn}).tolist()))
        sequences.discard(turn, [5])
        assert len(allocator.free_slots) == SLOTS - cached.length - 5
        sequences.drop(turn)
        assert len(allocator.free_slots) == SLOTS
