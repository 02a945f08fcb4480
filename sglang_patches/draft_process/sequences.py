"""The KV slots of each session: those of its text, and those of its trie's nodes.

They are known on the host. The device's table learns of them with the inputs of the forward that needs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from prometheus_client import Counter
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_patches.draft_process.batches import SCRATCH, Piece, TableChange
from sglang_patches.draft_side.draft import Draft

logger = logging.getLogger(__name__)

SPARE = 128  # slots, and places in its row, that a session has beyond its text when it begins: for its trie
IDLE_SECONDS = 2.0  # a session that was run within them is not idle
MUCH_LONGER = 2  # times as many tokens as another text: such a session makes room for it
EVICTED = Counter(
    "specstore_draft_evicted", "Sessions whose room in the draft model's KV cache was given to others"
)
REFUSED = Counter(
    "specstore_draft_no_room",
    "Sessions and draft forwards that found no room in the draft model's KV cache (--specstore-draft-tokens)",
)


@dataclass(slots=True, eq=False)
class Cached:
    """One session's KV slots.

    row: in the table.
    used: when the session was run last.
    slots: int32, as long as a row. The first `held` belong to the text's first tokens. Of these tokens the first `length` were run, and
        the device's table has the first `written`.
    nodes: slot of each node of the trie that was run.
    """

    row: int
    used: float
    slots: np.ndarray
    held: int = 0
    length: int = 0
    written: int = 0
    nodes: dict[int, int] = field(default_factory=dict)

    def hold(self, slots: Sequence[int]) -> None:
        """The slots belong to the text's next tokens."""
        end = self.held + len(slots)
        self.slots[self.held : end] = slots
        self.held = end


class SequenceCache:
    """The sessions' KV slots in the draft model's cache.

    The draft model's runner has no other user, so all its slots are taken at the start, and given out here. A session begins with slots
    for its whole text, so two that are half prefilled never wait for each other. Where not all sessions have room, those with the
    shortest texts do: they are the most. Raises ValueError where no row is left for a session.

    scratch: number of rows of the table for single rows of a forward; the sessions share the others.
    now: seconds by a steady clock.
    """

    def __init__(self, runner: ModelRunner, scratch: int, now: Callable[[], float] = time.monotonic) -> None:
        self.table: torch.Tensor = runner.req_to_token_pool.req_to_token
        allocator = runner.token_to_kv_pool_allocator
        self._free = allocator.alloc(allocator.available_size()).tolist()
        self.slots = len(self._free)
        self._now = now
        self._rows = list(range(SCRATCH + scratch, len(self.table)))
        if not self._rows:
            raise ValueError(
                f"specstore option draft_tokens: {self.slots} KV slots are too few for forwards of {scratch} rows: SGLang allows "
                f"{len(self.table) - 1} sequences"
            )
        self._cached: dict[Draft, Cached] = {}
        self._waiting: set[Draft] = set()  # sessions that found no room
        self._told = False

    @property
    def room(self) -> int:
        """Free slots."""
        return len(self._free)

    def of(self, draft: Draft) -> Cached | None:
        return self._cached.get(draft)

    def begin(self, draft: Draft) -> Cached | None:
        """One with slots for its text, of which nothing was run. None if there is no room: idle sessions make it, and sessions that are
        much longer."""
        length = draft.text.length
        while not self._rows or length + SPARE > self.room:
            if not (self._evict(self._idle({draft})) or self._evict(self._longest(MUCH_LONGER * length))):
                self._note_waiting(draft)
                return None
        self._waiting.discard(draft)
        cached = Cached(self._rows.pop(), self._now(), np.empty(self.table.shape[1], np.int32))
        cached.hold(self._taken(length))
        self._cached[draft] = cached
        return cached

    def take(self, count: int, users: Collection[Draft]) -> list[int] | None:
        """Free slots for sessions that are run now; None if there is no room. Idle sessions make it, then the longest one does, until a
        single one is left. users: the sessions, which are not idle from now on."""
        for draft in users:
            self._cached[draft].used = self._now()
        while count > self.room:
            evicted = self._idle(users) or self._longest(0)
            if len(self._cached) == 1 or not self._evict(evicted) or evicted in users:
                self._note_full()
                return None
        return self._taken(count)

    def _taken(self, count: int) -> list[int]:
        return [self._free.pop() for _ in range(count)]

    def lay_out(
        self, texts: Iterable[Cached], branches: Sequence[tuple[Cached, Sequence[int]]]
    ) -> tuple[list[int], TableChange]:
        """A scratch row for each branch, with the slots of the session's text and behind them those of a path of nodes; and what makes
        the device's table have them, and the rows of the texts, in one forward."""
        rows = list(range(SCRATCH, SCRATCH + len(branches)))
        texts = dict.fromkeys(texts)
        pieces = [self._unwritten(cached.row, cached) for cached in texts]
        for row, (cached, path) in zip(rows, branches, strict=True):
            pieces += [self._unwritten(row, cached), Piece(row, cached.length, np.array(path, np.int32))]
        copied = max((cached.written for cached, _ in branches), default=0)
        change = TableChange.of(
            [cached.row for cached, _ in branches], copied, pieces, row_length=self.table.shape[1]
        )
        for cached in texts:
            cached.written = cached.length
        return rows, change

    @staticmethod
    def _unwritten(row: int, cached: Cached) -> Piece:
        return Piece(row, cached.written, cached.slots[cached.written : cached.length])

    def commit(self, draft: Draft, start: int, path: Sequence[int]) -> None:
        """The text goes on at `start` with the path's nodes: those that were run give it their slots, without a copy."""
        cached = self._cached.get(draft)
        if cached is None:
            return
        kept = []
        if cached.length == start:
            for node in path:
                if node not in cached.nodes:
                    break
                kept.append(cached.nodes.pop(node))
        if kept:
            cached.hold(kept)
            cached.length = cached.held
        trie = draft.trie  # its root is the text's last token
        self.discard(draft, [node for node in cached.nodes if node not in trie or node == trie.root])

    def discard(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Frees the slots of these nodes, as far as they were run."""
        cached = self._cached.get(draft)
        if cached is not None:
            self._free += [cached.nodes.pop(node) for node in nodes if node in cached.nodes]

    def drop(self, draft: Draft) -> None:
        self._waiting.discard(draft)
        cached = self._cached.pop(draft, None)
        if cached is not None:
            self._free += [*cached.slots[: cached.held].tolist(), *cached.nodes.values()]
            self._rows.append(cached.row)

    def _idle(self, users: Container[Draft]) -> Draft | None:
        """The session that was run least recently, if that is long ago. users: are not idle."""
        others = [draft for draft in self._cached if draft not in users]
        oldest = min(others, key=lambda draft: self._cached[draft].used, default=None)
        if oldest is None or self._now() - self._cached[oldest].used < IDLE_SECONDS:
            return None
        return oldest

    def _longest(self, least: int) -> Draft | None:
        """The session with the longest text, if that has more than `least` tokens."""
        longest = max(self._cached, key=lambda draft: self._cached[draft].held, default=None)
        return None if longest is None or self._cached[longest].held <= least else longest

    def _evict(self, draft: Draft | None) -> bool:
        """Drops a session; whether there is one."""
        if draft is None:
            return False
        EVICTED.inc()
        self.drop(draft)
        return True

    def _note_waiting(self, draft: Draft) -> None:
        """Once for each time that a session waits."""
        if draft not in self._waiting:
            self._waiting.add(draft)
            self._note_full()

    def _note_full(self) -> None:
        REFUSED.inc()
        if not self._told:
            self._told = True
            logger.warning(
                "specstore: the draft model's KV cache is full, some requests get no drafts: raise --specstore-draft-tokens"
            )
