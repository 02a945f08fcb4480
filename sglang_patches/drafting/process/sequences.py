"""The KV slots of each session: those of its text, and those of its trie's nodes.

They are known on the host. The device's table learns of them with the inputs of the forward that needs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from prometheus_client import Counter
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.process.table import SCRATCH, Piece, TableChange

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2.0  # a session that was run within them keeps its KV
EVICTED = Counter("specstore_draft_evicted", "Sessions whose draft KV was given to others")
REFUSED = Counter(
    "specstore_draft_no_room", "Draft forwards that found no room in the draft model's KV cache"
)


@dataclass(slots=True, eq=False)
class Cached:
    """Of one session. row: in the table. slots: int32, as long as a row; the first `length` of them hold the text's first tokens, and the
    device's table has the first `written` of these. nodes: slots of the trie's nodes that were run. used: when it was run last."""

    row: int
    slots: np.ndarray
    length: int = 0
    written: int = 0
    nodes: dict[int, int] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)

    @property
    def last(self) -> int:
        """Slot of the last of these tokens."""
        return int(self.slots[self.length - 1])


class SequenceCache:
    """scratch: rows of the table for single rows of a forward; the sessions share the others.

    The draft model's runner has no other user, so all its slots are taken at the start, and given out here."""

    def __init__(self, runner: ModelRunner, scratch: int) -> None:
        self.table: torch.Tensor = runner.req_to_token_pool.req_to_token
        allocator = runner.token_to_kv_pool_allocator
        self._free = allocator.alloc(allocator.available_size()).tolist()
        self._rows = list(range(SCRATCH + scratch, len(self.table)))
        self._cached: dict[Draft, Cached] = {}
        self._told = False

    @property
    def room(self) -> int:
        """Free slots."""
        return len(self._free)

    def of(self, draft: Draft) -> Cached | None:
        """For use now."""
        cached = self._cached.get(draft)
        if cached is not None:
            cached.used = time.monotonic()
        return cached

    def begin(self, draft: Draft) -> Cached | None:
        """An empty one; None if there is no row for it."""
        if not self._rows and not self._evict({draft}):
            return None
        slots = np.empty(self.table.shape[1], np.int32)
        cached = self._cached[draft] = Cached(self._rows.pop(), slots)
        return cached

    def take(self, count: int, users: Container[Draft]) -> list[int] | None:
        """Free slots, taken from idle sessions if need be; None if there is no room. users: who is to be run."""
        while count > self.room:
            if not self._evict(users):
                self._note_full()
                return None
        return [self._free.pop() for _ in range(count)]

    def extend(self, cached: Cached, slots: Sequence[int]) -> None:
        """The slots hold the KV of the text's next tokens."""
        end = cached.length + len(slots)
        cached.slots[cached.length : end] = slots
        cached.length = end

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
        self.extend(cached, kept)
        self.discard(draft, [node for node in cached.nodes if node not in draft.trie])

    def discard(self, draft: Draft, nodes: Sequence[int]) -> None:
        """Frees the slots of these nodes, as far as they were run."""
        cached = self._cached.get(draft)
        if cached is not None:
            self._free += [cached.nodes.pop(node) for node in nodes if node in cached.nodes]

    def drop(self, draft: Draft) -> None:
        cached = self._cached.pop(draft, None)
        if cached is not None:
            self._free += [*cached.slots[: cached.length].tolist(), *cached.nodes.values()]
            self._rows.append(cached.row)

    def _evict(self, users: Container[Draft]) -> bool:
        """Drops the session that was run least recently, if it is idle; whether there was one."""
        others = [draft for draft in self._cached if draft not in users]
        oldest = min(others, key=lambda draft: self._cached[draft].used, default=None)
        if oldest is None or time.monotonic() - self._cached[oldest].used < IDLE_SECONDS:
            return False
        EVICTED.inc()
        self.drop(oldest)
        return True

    def _note_full(self) -> None:
        REFUSED.inc()
        if not self._told:
            self._told = True
            logger.warning(
                "specstore: the draft model's KV cache is full, some requests get no drafts: raise --specstore-draft-tokens"
            )
