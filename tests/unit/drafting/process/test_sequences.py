"""The slots of sessions, and the rows of the draft model's table."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.drafting.process.sequences import SequenceCache  # noqa: E402
from sglang_patches.drafting.process.upload import on_device  # noqa: E402

ROWS, COLUMNS, SLOTS, SCRATCH = 9, 40, 120, 4


class Allocator:
    """Slots 1 to SLOTS, on a device: taken from it once."""

    def __init__(self) -> None:
        self.free_slots = torch.arange(1, SLOTS + 1)

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> torch.Tensor:
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return taken


def runner(rows: int, columns: int) -> SimpleNamespace:
    table = torch.full((rows, columns), -1, dtype=torch.int32)
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool_allocator=Allocator()
    )


@pytest.fixture
def sequences() -> SequenceCache:
    return SequenceCache(runner(ROWS, COLUMNS), SCRATCH)


def laid_out(sequences, texts, branches):
    """The rows of the branches, once the device's table has them."""
    rows, change = sequences.lay_out(texts, branches)
    change.apply(sequences.table, on_device(change.arrays(), "cpu"))
    return rows


def grown(sequences, draft, lengths):
    """A session that grew in steps of these lengths, each with a forward, and its slots."""
    cached, text = sequences.begin(draft), []
    for length in lengths:
        slots = sequences.take(length, {draft})
        sequences.extend(cached, slots)
        laid_out(sequences, [cached], [])
        text += slots
    return cached, text


def test_a_text_has_its_slots_in_order_and_knows_the_last(sequences):
    cached, text = grown(sequences, "a", [5, 1, 3])
    assert sequences.table[cached.row, : cached.length].tolist() == text
    assert (cached.length, cached.last) == (9, text[-1])
    sequences.extend(cached, [])
    assert (cached.length, cached.last) == (9, text[-1])


def test_only_what_is_new_of_a_text_is_written(sequences):
    cached, text = grown(sequences, "a", [12])
    sequences.extend(cached, [101, 102])
    rows, change = sequences.lay_out([cached], [(cached, [103])])
    assert change.slots.tolist() == [101, 102, 101, 102, 103] and change.columns == 12
    change.apply(sequences.table, on_device(change.arrays(), "cpu"))
    assert sequences.table[rows[0], :15].tolist() == [*text, 101, 102, 103]
    assert sequences.table[cached.row, :14].tolist() == [*text, 101, 102]
    assert not len(sequences.lay_out([cached], [])[1].cells)


def test_branches_of_several_sessions_are_laid_out_at_once(sequences):
    (first, one), (second, two) = grown(sequences, "a", [12]), grown(sequences, "b", [3])
    branches = [(first, [101, 102]), (second, [103]), (first, [101, 104, 105]), (second, [106, 107])]
    rows = laid_out(sequences, [first, second], branches)
    assert len(set(rows)) == 4 and not {first.row, second.row} & set(rows)
    for row, (cached, path) in zip(rows, branches, strict=True):
        text = one if cached is first else two
        assert sequences.table[row, : len(text) + len(path)].tolist() == text + path
    assert sequences.table[first.row, :12].tolist() == one and sequences.table[second.row, :3].tolist() == two


def test_a_row_that_another_session_had_is_written_anew(sequences):
    for turn in range(2 * ROWS):
        cached, text = grown(sequences, turn, [5 + turn % 3])
        assert sequences.table[cached.row, : cached.length].tolist() == text
        sequences.drop(turn)


def test_no_branch_needs_no_row(sequences):
    assert laid_out(sequences, [], []) == []


def test_every_slot_comes_back(sequences):
    draw = random.Random(0)
    for turn in range(20):
        cached, _ = grown(sequences, turn, [draw.randint(1, 9) for _ in range(3)])
        cached.nodes.update(enumerate(sequences.take(6, {turn})))
        sequences.discard(turn, [5])
        rest = sequences.take(SLOTS - cached.length - 5, {turn})
        assert not set(rest) & {*cached.slots[: cached.length].tolist(), *cached.nodes.values()}
        assert sequences.room == 0 and sequences.take(1, {turn}) is None
        grown(sequences, "rest", [])[0].nodes.update(enumerate(rest))
        sequences.drop("rest")
        sequences.drop(turn)
        everything = sequences.take(SLOTS, {turn})
        assert sorted(everything) == list(range(1, SLOTS + 1))
        grown(sequences, "all", [])[0].nodes.update(enumerate(everything))
        sequences.drop("all")
