"""The slots of sessions, and the rows of the draft model's table."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.draft_process.batches import on_device  # noqa: E402
from sglang_patches.draft_process.sequences import (  # noqa: E402
    IDLE_SECONDS,
    REFUSED,
    SPARE,
    SequenceCache,
)
from sglang_patches.draft_side.draft import Draft  # noqa: E402
from sglang_patches.exchange.messages import GREEDY  # noqa: E402
from sglang_patches.exchange.text import Text  # noqa: E402
from sglang_patches.exchange.trie import Trie  # noqa: E402
from tests.support.draft_side import commit  # noqa: E402

ROWS, COLUMNS, SLOTS, SCRATCH = 9, 200, 400, 4


class Allocator:
    """Slots 1 to `slots`, on a device: taken from it once."""

    def __init__(self, slots: int = SLOTS) -> None:
        self.free_slots = torch.arange(1, slots + 1)

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


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sequences(clock) -> SequenceCache:
    return SequenceCache(runner(ROWS, COLUMNS), SCRATCH, clock)


def drafted(length):
    """A session whose text has so many tokens."""
    return Draft("s", Text(np.zeros(length, np.int32)), GREEDY, Trie(length))


def laid_out(sequences, texts, branches):
    """The rows of the branches, once the device's table has them."""
    rows, change = sequences.lay_out(texts, branches)
    change.apply(sequences.table, on_device(change.arrays(), "cpu"))
    return rows


def begun(sequences, length, steps=1):
    """A session whose text was run in so many forwards, and its slots."""
    draft = drafted(length)
    cached = sequences.begin(draft)
    for step in range(1, steps + 1):
        cached.length = length * step // steps
        laid_out(sequences, [cached], [])
    return draft, cached, cached.slots[:length].tolist()


def test_a_text_has_its_slots_in_order(sequences):
    _, cached, text = begun(sequences, 9, steps=3)
    assert sequences.table[cached.row, :9].tolist() == text and len(set(text)) == 9
    cached.hold([101, 102])
    assert cached.held == 11 and cached.slots[9:11].tolist() == [101, 102] and cached.length == 9


def test_only_what_is_new_of_a_text_is_written(sequences):
    _, cached, text = begun(sequences, 12)
    cached.hold([101, 102])
    cached.length = 14
    rows, change = sequences.lay_out([cached], [(cached, [103])])
    assert change.slots.tolist() == [101, 102, 101, 102, 103] and change.columns == 12
    change.apply(sequences.table, on_device(change.arrays(), "cpu"))
    assert sequences.table[rows[0], :15].tolist() == [*text, 101, 102, 103]
    assert sequences.table[cached.row, :14].tolist() == [*text, 101, 102]
    assert not len(sequences.lay_out([cached], [])[1].cells)


def test_branches_of_several_sessions_are_laid_out_at_once(sequences):
    (_, first, one), (_, second, two) = begun(sequences, 12), begun(sequences, 3)
    branches = [(first, [101, 102]), (second, [103]), (first, [101, 104, 105]), (second, [106, 107])]
    rows = laid_out(sequences, [first, second], branches)
    assert len(set(rows)) == 4 and not {first.row, second.row} & set(rows)
    for row, (cached, path) in zip(rows, branches, strict=True):
        text = one if cached is first else two
        assert sequences.table[row, : len(text) + len(path)].tolist() == text + path
    assert sequences.table[first.row, :12].tolist() == one and sequences.table[second.row, :3].tolist() == two


def test_a_row_that_another_session_had_is_written_anew(sequences):
    for turn in range(2 * ROWS):
        draft, cached, text = begun(sequences, 5 + turn % 3, steps=2)
        assert sequences.table[cached.row, : cached.length].tolist() == text
        sequences.drop(draft)


def test_no_branch_needs_no_row(sequences):
    assert laid_out(sequences, [], []) == []


def run_nodes(sequences, draft, cached, *nodes):
    """A chain of nodes below the root, in the trie; those that are named were run. Returns their slots."""
    for node in range(1, 4):
        draft.trie.add(node, node - 1, 10 + node, 0.5)
    slots = sequences.take(len(nodes), {draft})
    cached.nodes.update(zip(nodes, slots, strict=True))
    return slots


def committed(sequences, draft, *tokens):
    start = draft.text.length
    sequences.commit(draft, start, commit(draft, tokens, 1))


def test_the_nodes_of_a_committed_path_give_the_text_their_slots(sequences):
    draft, cached, text = begun(sequences, 9)
    first, second, third = run_nodes(sequences, draft, cached, 1, 2, 3)
    committed(sequences, draft, 11, 12)
    assert cached.slots[: cached.length].tolist() == [*text, first, second]
    assert cached.nodes == {3: third} and cached.held == cached.length == 11


def test_a_node_behind_one_that_was_not_run_gives_none(sequences):
    """Its slot would stand at the place of another token."""
    draft, cached, text = begun(sequences, 9)
    first, _ = run_nodes(sequences, draft, cached, 1, 3)
    committed(sequences, draft, 11, 12, 13)
    assert cached.slots[: cached.length].tolist() == [*text, first]
    assert cached.nodes == {} and sequences.room == SLOTS - 10


def test_nothing_is_taken_over_behind_a_text_that_was_not_run_to_its_end(sequences):
    draft, cached, text = begun(sequences, 9)
    run_nodes(sequences, draft, cached, 1)
    cached.length = 8
    committed(sequences, draft, 11)
    assert (cached.held, cached.length) == (9, 8) and cached.nodes == {}
    assert cached.slots[:9].tolist() == text and sequences.room == SLOTS - 9


def test_every_slot_comes_back(sequences):
    draw = random.Random(0)
    for _ in range(20):
        draft, cached, text = begun(sequences, draw.randint(1, 60))
        cached.nodes.update(enumerate(sequences.take(6, {draft})))
        sequences.discard(draft, [5])
        rest = sequences.take(SLOTS - len(text) - 5, {draft})
        assert not set(rest) & {*text, *cached.nodes.values()}
        cached.nodes.update(enumerate(rest, 6))
        assert sequences.room == 0 and sequences.take(1, {draft}) is None
        sequences.drop(draft)
        assert sequences.room == SLOTS


def test_a_session_begins_with_slots_for_its_whole_text_and_some_for_its_trie(sequences):
    """Two that are half prefilled would wait for each other."""
    begun(sequences, SLOTS - 100 - 2 * SPARE)
    assert sequences.room == 100 + 2 * SPARE
    assert begun(sequences, 100)[1].held == 100
    assert sequences.begin(drafted(SPARE + 1)) is None, "it had no slot left for its trie"
    assert sequences.begin(drafted(SPARE)) is not None


def test_a_session_that_was_not_run_for_long_makes_room_however_often_it_is_looked_at(sequences, clock):
    idle, _, _ = begun(sequences, 150)
    busy, _, _ = begun(sequences, 30)
    waiting = drafted(140)
    assert sequences.begin(waiting) is None
    clock.now += IDLE_SECONDS
    sequences.take(0, {busy})
    assert sequences.of(idle) is not None
    assert sequences.begin(waiting) is not None
    assert sequences.of(idle) is None and sequences.of(busy) is not None


def test_a_text_makes_room_for_one_that_is_much_shorter(sequences):
    """So most sessions have room. One that is a little longer keeps it: they would take it from each other."""
    long, _, _ = begun(sequences, 190)
    middle, _, _ = begun(sequences, 70)
    assert sequences.begin(drafted(95)) is None and sequences.of(long) is not None
    assert sequences.begin(drafted(60)) is not None
    assert sequences.of(long) is None and sequences.of(middle) is not None
    assert sequences.begin(long) is None, "the other way it makes none"


def test_the_longest_session_makes_room_for_the_tries_of_the_others(sequences):
    long, _, _ = begun(sequences, 190)
    short, cached, _ = begun(sequences, 30)
    cached.nodes.update(enumerate(sequences.take(SLOTS - 220, {short})))
    assert sequences.take(1, {short, long}) is None, "a session that is run now is missing then"
    assert sequences.of(long) is None and sequences.take(1, {short}) is not None
    cached.nodes.update(enumerate(sequences.take(sequences.room, {short}), 1000))
    assert sequences.take(1, {short}) is None and sequences.of(short) is not None, "the only one"


def test_what_finds_no_room_is_counted_once_for_each_wait(sequences):
    begun(sequences, 190)
    waiting, before = drafted(100), REFUSED._value.get()
    for _ in range(5):
        assert sequences.begin(waiting) is None
    assert REFUSED._value.get() == before + 1


def test_a_table_without_a_row_for_a_session_stops_the_start():
    """SGLang allows half as many sequences as there are slots."""
    with pytest.raises(
        ValueError, match="option draft_tokens: 400 KV slots are too few for forwards of 4 rows"
    ):
        SequenceCache(runner(1 + SCRATCH, COLUMNS), SCRATCH)
