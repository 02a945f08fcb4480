"""The KV slots of each session: those of its text in the runner's table, and those of its trie's nodes.

The table is on the model's device. What a forward asks of it is known here, so that the host reads nothing back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from prometheus_client import Counter
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_patches.drafting.draft import Draft

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2.0  # a session that was run within them keeps its KV
EVICTED = Counter("specstore_draft_evicted", "Sessions whose draft KV was given to others")
REFUSED = Counter(
    "specstore_draft_no_room", "Draft forwards that found no room in the draft model's KV cache"
)


@dataclass(slots=True, eq=False)
class Cached:
    """Of one session. row: in the table; its first `length` columns hold the slots of the text's first tokens, and `last` is the last of
    these. nodes: slots of the trie's nodes that were run. used: when it was run last."""

    row: int
    length: int = 0
    last: int = 0
    nodes: dict[int, int] = field(default_factory=dict)
    used: float = field(default_factory=time.monotonic)


class SequenceCache:
    """scratch: rows of the table for single rows of a forward; the sessions share the others."""

    def __init__(self, runner: ModelRunner, scratch: int) -> None:
        self.table: torch.Tensor = runner.req_to_token_pool.req_to_token
        self._allocator = runner.token_to_kv_pool_allocator
        rows = list(range(1, len(self.table)))  # row 0 is SGLang's
        self.scratch, self._rows = rows[:scratch], rows[scratch:]
        self._cached: dict[Draft, Cached] = {}
        self._told = False

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
        cached = self._cached[draft] = Cached(self._rows.pop())
        return cached

    def take(self, count: int, users: Container[Draft]) -> torch.Tensor | None:
        """int64 [count] free slots, taken from idle sessions if need be; None if there is no room. users: who is to be run."""
        while (slots := self._allocator.alloc(count)) is None:
            if not self._evict(users):
                self._note_full()
                return None
        return slots

    def extend(self, cached: Cached, slots: Sequence[int]) -> None:
        """The slots hold the KV of the text's next tokens."""
        if not slots:
            return
        end = cached.length + len(slots)
        self.table[cached.row, cached.length : end] = torch.tensor(slots, dtype=self.table.dtype)
        cached.length, cached.last = end, slots[-1]

    def lay_out(self, branches: Sequence[tuple[Cached, Sequence[int]]]) -> list[int]:
        """A scratch row of the table for each branch: the slots of the session's text, and behind them those of a path of nodes. Two
        copies to the device lay out all."""
        rows = self.scratch[: len(branches)]
        if not branches:
            return rows
        length = max(cached.length for cached, _ in branches)
        into, source = self._on_device([rows, [cached.row for cached, _ in branches]])
        self.table[into, :length] = self.table[source, :length]
        places = [
            (row, cached.length + depth, slot)
            for row, (cached, path) in zip(rows, branches, strict=True)
            for depth, slot in enumerate(path)
        ]
        into, columns, slots = self._on_device(places).T
        self.table[into, columns] = slots.to(self.table.dtype)
        return rows

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
            self._free([cached.nodes.pop(node) for node in nodes if node in cached.nodes])

    def drop(self, draft: Draft) -> None:
        cached = self._cached.pop(draft, None)
        if cached is not None:
            self._free([*self.table[cached.row, : cached.length].tolist(), *cached.nodes.values()])
            self._rows.append(cached.row)

    def _free(self, slots: list[int]) -> None:
        if slots:
            self._allocator.free(self._on_device(slots))

    def _on_device(self, numbers: Sequence) -> torch.Tensor:
        """int64"""
        return torch.tensor(numbers, dtype=torch.int64, device=self.table.device)

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
