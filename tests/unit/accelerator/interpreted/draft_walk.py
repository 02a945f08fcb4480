"""What a draft model goes through, over any of SGLang's attention backends: each answer is compared with dense attention over the whole
text and the path down to its node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_patches.draft_process import sequences
from sglang_patches.draft_process.model import SglangModel
from sglang_patches.draft_process.sequences import EVICTED, SPARE
from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Row
from sglang_patches.exchange.messages import GREEDY
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import Trie
from tests.support.draft_side import commit, text_of
from tests.unit.accelerator.interpreted.draft_runner import VOCABULARY, DraftRunner

CHUNK, ROWS, CONTEXT = 256, 24, 768
LENGTHS = (
    1,
    5,
    64,
    190,
    600,
)  # a text alone in a batch, one that is run as rows, three that share a chunk, of which one needs three more
SLOTS = sum(LENGTHS) + SPARE + 20  # no room for another text
CAPTURED = (1, 2, 4, 8, 12, 16, 24)


class Walk:
    """wrong: rows whose answers were not dense attention's."""

    def __init__(self, backend: type[AttentionBackend], graphs: bool) -> None:
        self.runner = DraftRunner(
            backend,
            requests=ROWS + len(LENGTHS) + 1,
            context=CONTEXT,
            slots=SLOTS,
            graphs=CAPTURED if graphs else (),
        )
        self.model = SglangModel(self.runner, ROWS, CHUNK, VOCABULARY)
        self._rng = np.random.default_rng(1)
        self.wrong: list[Row] = []

    def opened(self, *lengths: int) -> list[Draft]:
        """Sessions whose texts are prefilled together."""
        texts = [self._rng.integers(VOCABULARY, size=length).astype(np.int32) for length in lengths]
        drafts = [Draft(f"{len(text)} tokens", Text(text), GREEDY, Trie(len(text))) for text in texts]
        while not all(map(self.model.ready, drafts)):
            assert self.model.prefill(drafts)
        return drafts

    def run(self, rows: Sequence[Row]) -> None:
        """The likeliest two tokens after each become its children."""
        for row, found in zip(rows, self.model.forward(rows), strict=True):
            assert found is not None
            logits = self.runner.weights.logits_after(text_of(*row))
            expected = np.exp(logits - logits.max())
            expected /= expected.sum()
            best = -np.sort(-expected)[: len(found.tokens)]
            if (
                np.abs([expected[found.tokens] - found.probabilities, best - found.probabilities]).max()
                > 1e-5
            ):
                self.wrong.append(row)
            for token in found.tokens[:2].tolist():
                self.child(row, token)

    def child(self, row: Row, token: int) -> Row:
        trie = row.draft.trie
        return Row(row.draft, trie.add(trie.next_node, row.node, token, 0.5))

    def children(self, rows: Iterable[Row]) -> list[Row]:
        return [Row(draft, child) for draft, node in rows for child, _, _ in draft.trie.children(node)]

    def commit(self, draft: Draft, tokens: list[int]) -> None:
        start, epoch = draft.text.length, draft.trie.epoch
        missed = len(draft.trie.follow(tokens)) < len(tokens)
        self.model.commit(draft, start, commit(draft, tokens, epoch + missed))


def roots(drafts: Iterable[Draft]) -> list[Row]:
    return [Row(draft, draft.trie.root) for draft in drafts]


def walk(backend: type[AttentionBackend], graphs: bool, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """Texts that are prefilled; paths and siblings of several sessions; texts that go on along their tries and beside them; one that
    gives way to another and comes back."""
    it = Walk(backend, graphs)
    drafts = it.opened(*LENGTHS)
    it.run(roots(drafts[:1]))
    it.run(roots(drafts))
    siblings = it.children(roots(drafts))
    below = [it.child(row, 3) for row in siblings[:7]]
    deeper = [it.child(row, 4) for row in below[:7]]
    it.run([*deeper, *siblings[7:]])  # a row's parents are run with it: successive positions of one path
    along, beside, further, *_ = drafts
    it.commit(along, [along.trie.token(node) for node in along.trie.path(deeper[0].node)])
    it.commit(
        beside, [next(t for t in range(VOCABULARY) if beside.trie.child(beside.trie.root, t) is None), 7]
    )
    it.model.discard(further, [child for child, _, _ in further.trie.children(further.trie.root)])
    it.run(roots(drafts))
    it.run(it.children(roots(drafts[:3])))
    evicted = EVICTED._value.get()
    with monkeypatch.context() as patch:
        patch.setattr(sequences, "IDLE_SECONDS", 0.0)
        it.run(roots(it.opened(90)))
        for draft in drafts[:2]:
            if not it.model.ready(draft):
                it.model.prefill([draft])
        it.run(roots(drafts[:2]))
    assert EVICTED._value.get() > evicted
    decoded = {rows for mode, _, rows in it.runner.batches if mode.is_decode()}
    chunks = [starts for mode, starts, _ in it.runner.batches if mode.is_extend()]
    assert {1, ROWS} <= decoded
    assert chunks[:4] == [(0, 0, 0), (4,), (4 + CHUNK,), (4 + 2 * CHUNK,)]  # 63, 189 and 4 tokens are a chunk
    return it


def with_a_wrong_slot(backend: type[AttentionBackend]) -> tuple[list[Row], list[Row]]:
    """Rows that are wrong when one key of one text is another's, and those that are not to be right then."""
    it = Walk(backend, graphs=False)
    drafts = it.opened(64, 190)
    it.run(roots(drafts))
    assert it.wrong == []
    cached = it.model._sequences.of(drafts[1])
    assert cached is not None
    it.runner.requests.req_to_token[cached.row, 100] = int(cached.slots[50])
    it.run(roots(drafts))
    return it.wrong, roots(drafts[1:])
