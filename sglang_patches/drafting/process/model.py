"""The draft model in SGLang's model runner. Every draft forward is one decode batch over all sessions.

A row of the batch is a node of a trie, or the next token of a text. Rows may be successive positions of one path: a layer
writes the keys and values of all rows before it attends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from prometheus_client import Counter, Histogram, Summary
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.model import DraftModel, Row
from sglang_patches.drafting.process.candidates import choose
from sglang_patches.drafting.process.limits import Limits
from sglang_patches.drafting.process.sequences import Cached, SequenceCache
from sglang_patches.versions import host

CATCH_UP = 16  # tokens of a text that a decode batch runs as rows; more are prefilled
DEEPEST = 128  # levels below a text that its trie may have
FORWARD_SECONDS = Histogram(
    "specstore_draft_forward_seconds",
    "Draft forwards, by rows (rounded up to a power of two)",
    ["rows"],
    buckets=[1e-3 * 1.5**step for step in range(20)],
)
ROWS = Counter(
    "specstore_draft_rows", "Rows of draft forwards, by rows of the forward (rounded up)", ["rows"]
)
PREFILL_SECONDS = Summary("specstore_draft_prefill_seconds", "Prefills of chunks of texts by the draft model")
PREFILLED = Counter("specstore_draft_prefilled_tokens", "Tokens of these chunks")
NOWHERE = 1 << 62  # no node's number


class _Item(NamedTuple):
    """A token to run. node: None if the token belongs to the text."""

    draft: Draft
    node: int | None
    token: int
    position: int


class SglangModel(DraftModel):
    """A session's KV begins when it is drafted for.

    rows: most of a decode batch. chunk: tokens of a text that are prefilled at once. vocabulary: the target's. longest: tokens of a
    text that is drafted for."""

    def __init__(self, runner: ModelRunner, rows: int, chunk: int, vocabulary: int) -> None:
        self._runner = runner
        self._rows, self._chunk, self._vocabulary = rows, chunk, vocabulary
        self._sequences = SequenceCache(runner, rows)
        self.longest = min(runner.model_config.context_len, self._sequences.table.shape[1]) - DEEPEST
        self._limits = Limits(self.longest, runner.model_config.vocab_size)

    def commit(self, draft: Draft, start: int, path: Sequence[int]) -> None:
        self._sequences.commit(draft, start, path)

    def discard(self, draft: Draft, nodes: Sequence[int]) -> None:
        self._sequences.discard(draft, nodes)

    def close(self, draft: Draft) -> None:
        self._limits.close(draft)
        self._sequences.drop(draft)

    def ready(self, draft: Draft) -> bool:
        if not self._limits.take(draft):
            self._sequences.drop(draft)  # others can use its slots
            return False
        cached = self._sequences.of(draft)
        return cached is not None and draft.text.length - cached.length <= CATCH_UP

    def prefill(self, drafts: Sequence[Draft]) -> bool:
        waiting = (draft for draft in drafts if not self.ready(draft) and self._limits.take(draft))
        draft = next(waiting, None)
        cached = None if draft is None else self._sequences.of(draft) or self._sequences.begin(draft)
        if draft is None or cached is None:
            return False
        if self.ready(draft):  # a short text
            return True
        start = cached.length
        end = min(start + self._chunk, draft.text.length - 1)
        slots = self._sequences.take(end - start, {draft})
        if slots is None:
            return False
        self._sequences.extend(cached, slots.tolist())
        began = time.monotonic()
        self._run(extend_batch(cached.row, draft.text.between(start, end), start, slots))
        PREFILL_SECONDS.observe(time.monotonic() - began)
        PREFILLED.inc(end - start)
        return True

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        began = time.monotonic()
        items = list(dict.fromkeys(item for row in rows for item in self._items(row)))
        found: dict[Row, Candidates] = {}
        for begin in range(0, len(items), self._rows):
            done = self._forward(items[begin : begin + self._rows], set(rows))
            if done is None:
                break
            found |= done
        rows_label = str(1 << (len(items) - 1).bit_length())
        FORWARD_SECONDS.labels(rows_label).observe(time.monotonic() - began)
        ROWS.labels(rows_label).inc(len(items))
        return [found.get(row) for row in rows]

    def _items(self, row: Row) -> list[_Item]:
        """What has to be run for a row, a token before those that follow it."""
        draft, node = row
        cached, length = self._sequences.of(draft), draft.text.length
        assert cached is not None
        first = min(cached.length, length - 1) if node == draft.trie.root else cached.length
        tokens = draft.text.between(first, length).tolist()
        items = [_Item(draft, None, token, first + at) for at, token in enumerate(tokens)]
        return items + [
            _Item(draft, at, self._limits.embedded(draft.trie.token(at)), length + depth)
            for depth, at in enumerate(draft.trie.path(node))
            if at not in cached.nodes or at == node
        ]

    def _forward(self, items: Sequence[_Item], asked: set[Row]) -> dict[Row, Candidates] | None:
        """Runs the items. None if there is no room."""
        slots = self._slots(items)
        if slots is None:
            return None
        logits = self._run(decode_batch(self._table_rows(items), items, slots))
        answers = {self._row(item): at for at, item in enumerate(items) if self._row(item) in asked}
        if not answers:  # a text's tokens alone
            return {}
        samplings = [row.draft.sampling for row in answers]
        positions = [items[at].position + 1 for at in answers.values()]
        candidates = choose(logits[list(answers.values()), : self._vocabulary], samplings, positions)
        return dict(zip(answers, candidates, strict=True))

    @staticmethod
    def _row(item: _Item) -> Row:
        """That asks for what follows the item, if it is the text's last token or a node."""
        last = item.position == item.draft.text.length - 1
        node = item.draft.trie.root if item.node is None and last else item.node
        return Row(item.draft, NOWHERE if node is None else node)

    def _slots(self, items: Sequence[_Item]) -> list[int] | None:
        """Of each item; a token that is run again keeps its own."""
        kept = [self._slot(item) for item in items]
        taken = self._sequences.take(kept.count(None), {item.draft for item in items})
        if taken is None:
            return None
        free = iter(taken.tolist())
        slots = [next(free) if slot is None else slot for slot in kept]
        texts: dict[Cached, list[int]] = {}
        for item, slot, before in zip(items, slots, kept, strict=True):
            cached = self._cached(item)
            if item.node is not None:
                cached.nodes[item.node] = slot
            elif before is None:
                texts.setdefault(cached, []).append(slot)
        for cached, new in texts.items():
            self._sequences.extend(cached, new)
        return slots

    def _slot(self, item: _Item) -> int | None:
        """Of the text's tokens only the last is run again."""
        cached = self._cached(item)
        if item.node is not None:
            return cached.nodes.get(item.node)
        return cached.last if item.position < cached.length else None

    def _table_rows(self, items: Sequence[_Item]) -> list[int]:
        """For each item the row of the table with its slot and those of all tokens before it."""
        branches = [
            (cached := self._cached(item), [cached.nodes[node] for node in item.draft.trie.path(item.node)])
            for item in items
            if item.node is not None
        ]
        scratch = iter(self._sequences.lay_out(branches))
        return [self._cached(item).row if item.node is None else next(scratch) for item in items]

    def _cached(self, item: _Item) -> Cached:
        cached = self._sequences.of(item.draft)
        assert cached is not None
        return cached

    def _run(self, batch: ForwardBatch) -> torch.Tensor:
        """float [rows, vocabulary]"""
        runner = self._runner
        for field in ("input_ids", "req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
            setattr(batch, field, getattr(batch, field).to(runner.device, non_blocking=True))
        batch.spec_algorithm = runner.spec_algorithm
        batch.capture_hidden_mode = CaptureHiddenMode.NULL
        host.place_kv(runner, batch)
        with torch.no_grad():
            return runner.forward(batch).logits_output.next_token_logits


def decode_batch(rows: Sequence[int], items: Sequence[_Item], slots: Sequence[int]) -> ForwardBatch:
    """One row of the batch an item. rows: of the table. slots: where its KV goes."""
    positions = torch.tensor([item.position for item in items])
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(items),
        input_ids=torch.tensor([item.token for item in items]),
        req_pool_indices=torch.tensor(rows),
        seq_lens=positions + 1,
        out_cache_loc=torch.tensor(slots),
        seq_lens_sum=int(positions.sum()) + len(items),
        seq_lens_cpu=positions + 1,
        positions=positions,
    )


def extend_batch(row: int, tokens: np.ndarray, start: int, slots: torch.Tensor) -> ForwardBatch:
    """One text's next tokens, after its first `start`."""
    count = len(tokens)
    lengths = torch.tensor([start + count])
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.from_numpy(tokens.astype(np.int64)),
        req_pool_indices=torch.tensor([row]),
        seq_lens=lengths,
        out_cache_loc=slots,
        seq_lens_sum=start + count,
        seq_lens_cpu=lengths,
        positions=torch.arange(start, start + count),
        extend_num_tokens=count,
        extend_seq_lens=torch.tensor([count]),
        extend_prefix_lens=torch.tensor([start]),
        extend_start_loc=torch.zeros(1, dtype=torch.int64),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[start],
        extend_logprob_start_lens_cpu=[0],
    )
