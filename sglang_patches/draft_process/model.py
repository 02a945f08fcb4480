"""The draft model in SGLang's model runner. Every draft forward is one decode batch over all sessions.

A row of the batch is a node of a trie, or the next token of a text. Rows may be successive positions of one path: a layer
writes the keys and values of all rows before it attends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from prometheus_client import Counter, Histogram, Summary
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_patches.draft_process.batches import (
    BatchFields,
    Stretch,
    TableChange,
    decode_fields,
    extend_fields,
    on_device,
)
from sglang_patches.draft_process.limits import Limits
from sglang_patches.draft_process.sequences import SPARE, Cached, SequenceCache
from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import DraftModel, Row
from sglang_patches.exchange.messages import Sampling
from sglang_patches.host.versions import host
from sglang_patches.verification.shared_noise import NO_NOISE, best, filtered_probabilities

COUNT = 32  # choices of a row
CATCH_UP = 16  # tokens of a text that a decode batch runs as rows; more are prefilled
FORWARD_SECONDS = Histogram(
    "specstore_draft_forward_seconds",
    "Time of a draft forward, by its rows (rounded up to a power of two)",
    ["rows"],
    buckets=[1e-3 * 1.5**step for step in range(20)],
)
ROWS = Counter(
    "specstore_draft_rows",
    "Rows of all draft forwards, by rows of the forward (rounded up to a power of two)",
    ["rows"],
)
PREFILL_SECONDS = Summary(
    "specstore_draft_prefill_seconds", "Time of the draft model's prefills, each of a chunk of texts"
)
PREFILLED = Counter("specstore_draft_prefilled_tokens", "Tokens that the draft model prefilled")
NOWHERE = 1 << 62  # no node's number


def choose(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[Candidates]:
    """The first choices of each row. logits: [rows, vocabulary]. positions: index in its sequence of the token that is drawn.

    Rows of requests that are drawn without noise take the likeliest tokens. The host waits for the device once, at the end.
    """
    told = on_device(_wishes(samplings) | {"positions": np.array(positions, np.int64)}, logits.device)
    filters = told.get("top_ks"), told.get("top_ps"), told.get("min_ps")
    probabilities = filtered_probabilities(logits, told["temperatures"], *filters)
    tokens, chances = best(probabilities, told.get("seeds"), told["positions"], min(COUNT, logits.shape[1]))
    found = torch.stack((tokens.to(torch.int32), chances.view(torch.int32))).cpu().numpy()
    return [Candidates(*row) for row in zip(found[0], found[1].view(np.float32), strict=True)]


def _wishes(samplings: Sequence[Sampling]) -> dict[str, np.ndarray]:
    """What the rows ask for, without what none asks for."""
    plain = Sampling(1.0, TOP_K_ALL, 1.0, 0.0, NO_NOISE)
    rows = [plain if sampling.noise is None else sampling for sampling in samplings]
    wishes: dict[str, np.ndarray] = {
        "top_ks": np.array([row.top_k for row in rows], np.int64),
        "top_ps": np.array([row.top_p for row in rows], np.float32),
        "min_ps": np.array([row.min_p for row in rows], np.float32),
        "seeds": np.array([row.noise for row in rows], np.int64),
    }
    nothing = {"top_ks": plain.top_k, "top_ps": plain.top_p, "min_ps": plain.min_p, "seeds": plain.noise}
    asked = {name: of for name, of in wishes.items() if (of != nothing[name]).any()}
    return asked | {"temperatures": np.array([row.temperature for row in rows], np.float32)}


class _Item(NamedTuple):
    """A token to run. node: None if the token belongs to the text."""

    draft: Draft
    node: int | None
    token: int
    position: int


class SglangModel(DraftModel):
    """A session's KV begins when it is drafted for.

    rows: most of a decode batch. chunk: tokens of a text that are prefilled at once. vocabulary: the target's. longest: tokens of a
    text that is drafted for. now: seconds by a steady clock. Raises ValueError where that leaves no text."""

    def __init__(
        self,
        runner: ModelRunner,
        rows: int,
        chunk: int,
        vocabulary: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._rows, self._chunk, self._vocabulary = rows, chunk, vocabulary
        self._sequences = SequenceCache(runner, rows, now)
        columns = self._sequences.table.shape[1]
        context, slots = min(runner.model_config.context_len, columns), self._sequences.slots
        self.longest = min(context, slots) - SPARE
        if self.longest < 1:
            raise ValueError(
                f"the draft model could draft for no text: {SPARE} tokens of its context ({context}) and of its KV cache "
                f"(--specstore-draft-tokens, {slots}) are kept for drafts"
            )
        self._limits = Limits(self.longest, runner.model_config.vocab_size)

    def commit(self, draft: Draft, start: int, path: Sequence[int]) -> None:
        self._sequences.commit(draft, start, path)

    def discard(self, draft: Draft, nodes: Sequence[int]) -> None:
        self._sequences.discard(draft, nodes)

    def close(self, draft: Draft) -> None:
        self._limits.close(draft)
        self._sequences.drop(draft)

    def takes(self, draft: Draft) -> bool:
        return self._limits.take(draft)

    def ready(self, draft: Draft) -> bool:
        cached = self._sequences.of(draft)
        return cached is not None and self.takes(draft) and draft.text.length - cached.length <= CATCH_UP

    def prefill(self, drafts: Sequence[Draft]) -> bool:
        """Runs those that wait, the ones with the least to run first, as far as a chunk holds them and there is room."""
        found = self._stretches([draft for draft in drafts if not self.ready(draft) and self.takes(draft)])
        run = {cached: stretch for cached, stretch in found.items() if len(stretch.tokens)}
        if run:
            began = time.monotonic()
            _, change = self._sequences.lay_out(run, [])
            # The host waits for the chunk: else its time would count as that of the next forward.
            self._run(extend_fields(list(run.values())), change, [0])[0, 0].item()
            PREFILL_SECONDS.observe(time.monotonic() - began)
            PREFILLED.inc(sum(len(stretch.tokens) for stretch in run.values()))
        return bool(found)

    def _stretches(self, waiting: Iterable[Draft]) -> dict[Cached, Stretch]:
        """The next tokens of as many texts as a chunk holds."""
        found: dict[Draft, tuple[Cached, Stretch]] = {}
        left = self._chunk
        for draft in sorted(waiting, key=self._left):
            cached = self._sequences.of(draft) or self._sequences.begin(draft)
            stretch = None if cached is None else self._stretch(draft, cached, left)
            if cached is not None and stretch is not None:
                found[draft] = cached, stretch
                left -= len(stretch.tokens)
            if not left:
                break
        # A later one may have been given the room of an earlier one.
        return dict(of for draft, of in found.items() if self._sequences.of(draft) is of[0])

    def _left(self, draft: Draft) -> int:
        """Tokens of its text that were not run."""
        cached = self._sequences.of(draft)
        return draft.text.length - (cached.length if cached else 0)

    def _stretch(self, draft: Draft, cached: Cached, most: int) -> Stretch | None:
        """The next tokens of a text, at most so many, with their slots: none of a short text, which rows of a forward run. None if there
        is no room."""
        start = cached.length
        end = start if self.ready(draft) else min(start + most, draft.text.length - 1)
        grown = self._sequences.take(max(0, end - cached.held), {draft})
        if grown is None:
            return None
        cached.hold(grown)
        cached.length = end
        return Stretch(cached.row, start, draft.text.between(start, end), cached.slots[start:end])

    def forward(self, rows: Sequence[Row]) -> list[Candidates | None]:
        began = time.monotonic()
        items = list(dict.fromkeys(item for row in rows for item in self._items(row)))
        found: dict[Row, Candidates] = {}
        for begin in range(0, len(items), self._rows):
            done = self._forward(items[begin : begin + self._rows], set(rows))
            if done is None:
                return [found.get(row) for row in rows]
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
        answers = {self._row(item): at for at, item in enumerate(items) if self._row(item) in asked}
        rows, change = self._lay_out(items)
        tokens, positions = [item.token for item in items], [item.position for item in items]
        fields = decode_fields(rows, tokens, positions, slots)
        logits = self._run(fields, change, list(answers.values()))
        if not answers:  # a text's tokens alone
            return {}
        samplings = [row.draft.sampling for row in answers]
        drawn = [items[at].position + 1 for at in answers.values()]
        candidates = choose(logits, samplings, drawn)
        return dict(zip(answers, candidates, strict=True))

    @staticmethod
    def _row(item: _Item) -> Row:
        """That asks for what follows the item, if it is the text's last token or a node."""
        last = item.position == item.draft.text.length - 1
        node = item.draft.trie.root if item.node is None and last else item.node
        return Row(item.draft, NOWHERE if node is None else node)

    def _slots(self, items: Sequence[_Item]) -> list[int] | None:
        """Gives each item a KV slot. A token that is run again keeps its own. None if there is no room."""
        kept = [self._slot(item) for item in items]
        taken = self._sequences.take(kept.count(None), {item.draft for item in items})
        if taken is None:
            return None
        free = iter(taken)
        slots = [next(free) if slot is None else slot for slot in kept]
        for item, slot in zip(items, slots, strict=True):
            cached = self._cached(item)
            if item.node is not None:
                cached.nodes[item.node] = slot
                continue
            if item.position == cached.held:
                cached.hold([slot])
            cached.length = max(cached.length, item.position + 1)
        return slots

    def _slot(self, item: _Item) -> int | None:
        """That it has already."""
        cached = self._cached(item)
        if item.node is not None:
            return cached.nodes.get(item.node)
        return int(cached.slots[item.position]) if item.position < cached.held else None

    def _lay_out(self, items: Sequence[_Item]) -> tuple[list[int], TableChange]:
        """For each item the row of the table with its slot and those of all tokens before it; and what makes the table have them."""
        branches = [
            (cached := self._cached(item), [cached.nodes[node] for node in item.draft.trie.path(item.node)])
            for item in items
            if item.node is not None
        ]
        scratch, change = self._sequences.lay_out(map(self._cached, items), branches)
        rows = iter(scratch)
        return [self._cached(item).row if item.node is None else next(rows) for item in items], change

    def _cached(self, item: _Item) -> Cached:
        cached = self._sequences.of(item.draft)
        assert cached is not None
        return cached

    def _run(self, fields: BatchFields, change: TableChange, asked: Sequence[int] = ()) -> torch.Tensor:
        """Logits of the asked rows, [asked, vocabulary]. The host waits for nothing."""
        runner = self._runner
        asked_rows = {"asked": np.array(asked, np.int64)}
        told = on_device(fields.on_device | change.arrays() | asked_rows, runner.device)
        change.apply(self._sequences.table, told)
        batch = ForwardBatch(
            **{name: told[name] for name in fields.on_device},
            **fields.on_host,
            spec_algorithm=runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        host.place_kv(runner, batch)
        with torch.no_grad():
            logits = runner.forward(batch).logits_output.next_token_logits
        return logits[:, : self._vocabulary].index_select(0, told["asked"])
