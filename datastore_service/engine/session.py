"""Text that grows and is indexed token by token: a session's text, and the live tier's fresh text.

One int32 buffer has three parts: the tokens; for each length in `GRAMS`, a link from every position to the previous
position where the same n-gram ends; and one hash table from an n-gram to the last position where it ends. The chain of
links from the last position of the text leads through all occurrences of the current n-gram. A counting trie (SSSD,
Algorithm 1) would count the same occurrences; here each one is visited in its context, so its match length is known.

`SessionIndex.reserve` makes room for the next tokens before a kernel appends them, so kernels never allocate.

Refused tokens are kept next to the text: (position, token) pairs in the order of their positions, so that a binary
search finds what was refused at an occurrence. The last draft is kept until text follows, to count how many of its nodes
came true.

A reader may run at the same time as the writer (live tier) as long as the buffer is not replaced: tokens and links are
written before the slot that leads to them, and the length after everything that it covers.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from datastore_service.engine.kernel import kernel
from datastore_service.engine.memory import (
    address_of,
    prefetch,
    publish_i32,
    publish_i64,
    read_i32,
    view_i32,
    view_i64,
)

GRAMS = (1, 2, 3, 4, 8)
LEVELS = len(GRAMS)
LONGEST_GRAM = GRAMS[-1]
SEPARATOR = -1  # between the documents of a conversation; never part of an n-gram
NOBODY = -1  # owner of a text that all sessions search
MAX_TOKENS = (1 << 31) // LEVELS - 2

# Fields of a session's descriptor.
BUFFER, CAPACITY, SLOTS, LENGTH, USED, REFUSED, REFUSALS, DRAFT, DRAFT_ROOM, DRAFT_NODES = range(10)
DESCRIPTOR_FIELDS = 10
# Rows of the last draft, int32 [DRAFT_ROWS, DRAFT_ROOM].
DRAFT_TOKENS, DRAFT_PARENTS, DRAFT_TIERS = range(3)
DRAFT_ROWS = 3
_MIN_CAPACITY = 128
_GROWTH = 1.25
_REFUSED_AT_ONE_PLACE = 2  # tokens kept for each position; a tree lists the likeliest first
_MIN_REFUSALS = 32


_NOTHING_REFUSED = np.empty((0, 2), dtype=np.int32)
_NO_DRAFT = np.empty((DRAFT_ROWS, 0), dtype=np.int32)


class SessionIndex:
    """Text of one session, its n-gram index and the tokens refused in it; 50 to 90 bytes a token.

    text_start: start of the request's own text. Tokens before it belong to earlier requests of the conversation.
    owner: address of the index whose session does not search this text, because it has written it; else NOBODY.
    """

    __slots__ = (
        "_buffer",
        "_descriptor",
        "_draft",
        "_fields",
        "_free",
        "_refused",
        "address",
        "owner",
        "text_start",
    )

    def __init__(self, capacity: int = _MIN_CAPACITY) -> None:
        """Makes an index without text.

        capacity: tokens that fit the first buffer."""
        self._descriptor = np.zeros(DESCRIPTOR_FIELDS, dtype=np.int64)
        self._refused = _NOTHING_REFUSED
        self._draft = _NO_DRAFT
        self._free = 0  # tokens that certainly fit
        self._fields = self._descriptor.data  # the same memory, read as Python integers
        self.address = address_of(self._descriptor)
        self.text_start = 0
        self.owner = NOBODY
        self._allocate(capacity, _slots_for(0, capacity))

    def __len__(self) -> int:
        return self._fields[LENGTH]

    @property
    def known(self) -> int:
        """Tokens of the request's own text."""
        return self._fields[LENGTH] - self.text_start

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes + self._draft.nbytes

    @property
    def refused_nbytes(self) -> int:
        return self._refused.nbytes

    def has_room(self, extra: int) -> bool:
        """Whether `extra` more tokens fit the buffer."""
        _, capacity, slots, length, used, *_ = self._fields
        return length + extra <= capacity and _fits(used + LEVELS * extra, slots)

    @property
    def tokens(self) -> np.ndarray:
        """int32 [len], a view that the next `reserve` may detach."""
        return self._buffer[: len(self)]

    def text(self) -> np.ndarray:
        """int32 [known], a view of the request's own text."""
        return self._buffer[self.text_start : len(self)]

    def reserve(self, extra: int, nodes: int = 0, tentative: int = 0) -> None:
        """Makes room for `extra` more tokens, which are appended before the next call, for `tentative` tokens of a query
        after them, and for a draft of `nodes`."""
        if nodes > self._fields[DRAFT_ROOM]:
            self._allocate_draft(nodes)
        if extra + tentative > self._free:
            self._grow(extra + tentative)
        self._free -= extra

    def _grow(self, extra: int) -> None:
        if not self.has_room(extra):
            _, capacity, slots, length, used, *_ = self._fields
            if length + extra > capacity:
                capacity = max(length + extra, int(_GROWTH * capacity))
            old, old_buffer = self._descriptor.copy(), self._buffer
            self._allocate(capacity, max(slots, _slots_for(used, extra)))
            _refill(address_of(old), self.address)
            del old_buffer  # the kernel read it through an address
        _, capacity, slots, length, used, *_ = self._fields
        self._free = min(capacity - length, (3 * slots // 4 - used) // LEVELS)

    def append(self, tokens: np.ndarray) -> None:
        """Adds int32 tokens (or SEPARATOR)."""
        self.reserve(len(tokens))
        append_tokens(self.address, np.array(tokens, dtype=np.int32), 0, len(tokens))

    def refuse(self, position: int, tokens: np.ndarray, limit: int) -> None:
        """Notes that the target refused `tokens` after `position` tokens of the request's own text. Keeps at most `limit`
        in all.

        Positions rise. A position that does not rise comes from a repeated message and is ignored."""
        place, count = self.text_start + position, self._fields[REFUSALS]
        last = int(self._refused[count - 1, 0]) if count else -1
        kept = min(len(tokens), _REFUSED_AT_ONE_PLACE, limit - count)
        if place <= last or kept <= 0:
            return
        if count + kept > len(self._refused):
            self._allocate_refused(max(_MIN_REFUSALS, int(_GROWTH * (count + kept))))
        self._refused[count : count + kept, 0] = place
        self._refused[count : count + kept, 1] = tokens[:kept]
        self._fields[REFUSALS] = count + kept

    def forget_drafting(self) -> None:
        """Forgets the refused tokens and the last draft, when the request ends."""
        self.forget_refused()
        self._draft = _NO_DRAFT
        self._descriptor[DRAFT : DRAFT_NODES + 1] = 0

    def forget_refused(self) -> None:
        self._refused = _NOTHING_REFUSED
        self._fields[REFUSALS] = 0

    @property
    def refused(self) -> np.ndarray:
        """int32 [refusals, 2]: position among all tokens, token."""
        return self._refused[: self._fields[REFUSALS]]

    def begin_document(self) -> None:
        """Begins a new document, the request's own text."""
        if len(self):
            self.append(np.array([SEPARATOR], dtype=np.int32))
        self.text_start = len(self)

    def occurrences(self, gram: int) -> np.ndarray:
        """Earlier end positions of the last `gram` tokens, newest first; gram is one of GRAMS."""
        chain = []
        links = self._links(GRAMS.index(gram))
        position = links[len(self) - 1] if len(self) else -1
        while position >= 0:
            chain.append(int(position))
            position = links[position]
        return np.array(chain, dtype=np.int64)

    def _links(self, level: int) -> np.ndarray:
        capacity = self._fields[CAPACITY]
        return self._buffer[(1 + level) * capacity : (2 + level) * capacity]

    def _allocate(self, capacity: int, slots: int) -> None:
        self._buffer = np.empty(capacity * (1 + LEVELS) + slots, dtype=np.int32)
        self._buffer[-slots:] = 0
        self._descriptor[: USED + 1] = (address_of(self._buffer), capacity, slots, 0, 0)

    def _allocate_draft(self, nodes: int) -> None:
        """Replaces the last draft, whose nodes will not be counted."""
        self._draft = np.empty((DRAFT_ROWS, nodes), dtype=np.int32)
        self._descriptor[DRAFT : DRAFT_NODES + 1] = address_of(self._draft), nodes, 0

    def _allocate_refused(self, room: int) -> None:
        refused = np.empty((room, 2), dtype=np.int32)
        refused[: self._fields[REFUSALS]] = self.refused
        self._refused = refused
        self._fields[REFUSED] = address_of(refused)


def _fits(used: int, slots: int) -> bool:
    return 4 * used <= 3 * slots


def _slots_for(used: int, extra: int) -> int:
    """The power of two that keeps the hash table at most three quarters full."""
    return 1 << max(6, (4 * (used + LEVELS * extra) // 3).bit_length())


@njit(inline="always")
def text_of(descriptor):
    """The tokens of a session, and their links [LEVELS, capacity]."""
    capacity = descriptor[CAPACITY]
    buffer = view_i32(descriptor[BUFFER], capacity * (1 + LEVELS))
    return buffer[:capacity], buffer[capacity:].reshape((LEVELS, capacity))


@njit(inline="always")
def mix(hashed, token):
    hashed = (hashed ^ np.uint64(token + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return hashed ^ (hashed >> np.uint64(29))


@njit(inline="always")
def _slots(descriptor):
    """Address of the hash table."""
    return descriptor[BUFFER] + 4 * (1 + LEVELS) * descriptor[CAPACITY]


@njit(inline="always")
def first_slot(descriptor, hashed):
    """The slot where the search for an n-gram of that hash begins."""
    return np.int64(hashed >> np.uint64(20)) & (descriptor[SLOTS] - 1)


@njit(inline="always")
def find_gram(descriptor, tokens, slot, level, text, last):
    """Looks up the n-gram that ends at text[last]; `slot` is its first slot. Returns its slot and the last position in
    `tokens` where it ends, or the free slot where it belongs and -1."""
    slots, mask = _slots(descriptor), descriptor[SLOTS] - 1
    while True:
        entry = read_i32(slots, slot) - 1
        if entry < 0:
            return slot, np.int64(-1)
        position = entry // LEVELS
        if entry - position * LEVELS == level:
            back = 0
            while back < GRAMS[level] and np.int64(tokens[position - back]) == text[last - back]:
                back += 1
            if back == GRAMS[level]:
                return slot, position
        slot = (slot + 1) & mask


@njit(inline="always")
def _hash_grams(descriptor, tokens, links, position):
    """Writes the first slot of each n-gram that ends at `position` to the place of its link, and prefetches the slots, which
    are in random places. Returns the number of n-grams."""
    level = 0
    hashed = np.uint64(0)
    for back in range(LONGEST_GRAM):
        if position < back or tokens[position - back] == SEPARATOR:
            break
        hashed = mix(hashed, tokens[position - back])
        if back + 1 == GRAMS[level]:
            slot = first_slot(descriptor, hashed)
            links[level, position] = slot
            prefetch(_slots(descriptor) + 4 * slot)
            level += 1
    return level


@kernel
def append_tokens(address, source, begin, end):
    """Appends source[begin:end] (int32) to the session at `address`, which has reserved the room."""
    descriptor = view_i64(address, DESCRIPTOR_FIELDS)
    tokens, links = text_of(descriptor)
    length = descriptor[LENGTH]
    for position in range(length, length + end - begin):
        tokens[position] = source[begin + position - length]
        known = _hash_grams(descriptor, tokens, links, position)
        for level in range(known):
            slot, earlier = find_gram(
                descriptor, tokens, np.int64(links[level, position]), level, tokens, position
            )
            links[level, position] = earlier
            publish_i32(_slots(descriptor), slot, position * LEVELS + level + 1)
            descriptor[USED] += earlier < 0
        for rest in range(known, LEVELS):
            links[rest, position] = -1
    publish_i64(address, LENGTH, length + end - begin)


@njit
def follow_with(address, source, begin, end, result):
    """Writes to `result` (address of int64 [DESCRIPTOR_FIELDS]) the descriptor that the session at `address` would have if
    source[begin:end] (int32) followed its text. The session has reserved the room.

    The tokens, and links from the last of them, are written to the places of the next appended tokens. Nothing else of
    the session changes: n-grams within these tokens are found by comparison, not in the hash table."""
    descriptor = view_i64(result, DESCRIPTOR_FIELDS)
    descriptor[:] = view_i64(address, DESCRIPTOR_FIELDS)
    if begin == end:
        return
    tokens, links = text_of(descriptor)
    length = descriptor[LENGTH]
    last = length + end - begin - 1
    tokens[length : last + 1] = source[begin:end]
    known = _hash_grams(descriptor, tokens, links, last)
    for level in range(known):
        slot, at = np.int64(links[level, last]), last
        for position in range(last - 1, length - 1, -1):
            if _same_gram(tokens, position, last, GRAMS[level]):
                links[level, at] = position
                at = position
        _, earlier = find_gram(descriptor, tokens, slot, level, tokens, last)
        links[level, at] = earlier
    for rest in range(known, LEVELS):
        links[rest, last] = -1
    descriptor[LENGTH] = last + 1


@njit(inline="always")
def _same_gram(tokens, position, last, size):
    """Whether the same `size` tokens end at both positions."""
    back = 0
    while back < size and back <= position and tokens[position - back] == tokens[last - back]:
        back += 1
    return back == size


@kernel
def _refill(old_address, new_address):
    """Copies a session to a larger buffer. If the hash table has grown, it is filled again."""
    old, new = view_i64(old_address, DESCRIPTOR_FIELDS), view_i64(new_address, DESCRIPTOR_FIELDS)
    old_tokens, old_links = text_of(old)
    tokens, links = text_of(new)
    length = old[LENGTH]
    tokens[:length] = old_tokens[:length]
    for level in range(LEVELS):
        links[level, :length] = old_links[level, :length]
    new[LENGTH] = length
    new[USED] = old[USED]
    old_table, table = view_i32(_slots(old), old[SLOTS]), view_i32(_slots(new), new[SLOTS])
    if old[SLOTS] == new[SLOTS]:
        table[:] = old_table
        return
    mask = new[SLOTS] - 1
    for old_slot in range(old[SLOTS]):
        entry = np.int64(old_table[old_slot]) - 1
        if entry < 0:
            continue
        position = entry // LEVELS
        level = entry - position * LEVELS
        hashed = np.uint64(0)
        for back in range(GRAMS[level]):
            hashed = mix(hashed, tokens[position - back])
        slot = first_slot(new, hashed)
        while table[slot] != 0:  # used by another n-gram: each is in the old table once
            slot = (slot + 1) & mask
        table[slot] = entry + 1
