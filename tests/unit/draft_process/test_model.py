"""Which tokens each row of a draft forward sees: of the session's text, and of the path down to its node, whatever was run before.

SGLang's runner is replaced by one that keeps tokens where a model keeps keys and values: a row's logits are a function of the tokens
that it finds in the slots of its table row.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.draft_process import model as process_model  # noqa: E402
from sglang_patches.draft_process.model import SglangModel  # noqa: E402
from sglang_patches.draft_process.sequences import SPARE  # noqa: E402
from sglang_patches.draft_side.draft import Draft  # noqa: E402
from sglang_patches.draft_side.seams import Row  # noqa: E402
from sglang_patches.exchange.messages import GREEDY  # noqa: E402
from sglang_patches.exchange.text import Text  # noqa: E402
from sglang_patches.exchange.trie import Trie  # noqa: E402
from tests.support.draft_side import commit, text_of  # noqa: E402
from tests.unit.draft_process.test_sequences import SLOTS, Allocator  # noqa: E402

VOCABULARY, CONTEXT, CHUNK, ROWS = 11, 60, 8, 4


def logits_of(text: list[int]) -> np.ndarray:
    return np.random.default_rng([len(text), *text]).normal(size=VOCABULARY).astype(np.float32)


class Runner:
    """context: tokens of a sequence, beside those of its trie. slots: of the KV cache."""

    device, spec_algorithm = "cpu", None

    def __init__(self, context: int = CONTEXT, slots: int = SLOTS, sessions: int = 3) -> None:
        self.model_config = SimpleNamespace(context_len=context + SPARE, vocab_size=VOCABULARY)
        self.token_to_kv_pool_allocator = Allocator(slots)
        table = torch.zeros(1 + ROWS + sessions, context + SPARE, dtype=torch.int32)
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self._kept = torch.full((slots + 1,), VOCABULARY)

    def forward(self, batch) -> SimpleNamespace:
        assert batch.input_ids.max() < VOCABULARY, "as an embedding that has no such row"
        self._kept[batch.out_cache_loc] = batch.input_ids
        table, logits = (
            self.req_to_token_pool.req_to_token,
            np.zeros((batch.batch_size, VOCABULARY), np.float32),
        )
        for at, (row, length) in enumerate(zip(batch.req_pool_indices, batch.seq_lens, strict=True)):
            logits[at] = logits_of(self._kept[table[row, :length].long()].tolist())
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=torch.from_numpy(logits)))


@pytest.fixture
def model(monkeypatch) -> SglangModel:
    monkeypatch.setattr(process_model.host, "place_kv", lambda runner, batch: None)
    return SglangModel(Runner(), ROWS, CHUNK, VOCABULARY)


def opened(draw: random.Random, model: SglangModel) -> Draft:
    text = np.array([draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20))], np.int32)
    draft = Draft("s", Text(text), GREEDY, Trie(len(text)))
    while not model.ready(draft):
        assert model.prefill([draft])
    return draft


def follow(draft: Draft, node: int, token: int) -> None:
    if draft.trie.child(node, token) is None:
        draft.trie.add(draft.trie.next_node, node, token, 0.5)


def goes_on(draw: random.Random, model: SglangModel, draft: Draft) -> None:
    """Some steps down the trie, and sometimes a token that it does not have."""
    node, tokens = draft.trie.root, []
    while (children := list(draft.trie.children(node))) and draw.random() < 0.7:
        node, token, _ = draw.choice(children)
        tokens.append(token)
    if missed := not tokens or draw.random() < 0.3:
        tokens.append(next(token for token in range(VOCABULARY) if draft.trie.child(node, token) is None))
    start, epoch = draft.text.length, draft.trie.epoch + missed
    model.commit(draft, start, commit(draft, tokens, epoch))


def run(draw: random.Random, model: SglangModel, draft: Draft) -> None:
    """Any of its nodes, also one that was run before; each answer becomes a child."""
    nodes = [draft.trie.root, *(node for node in range(1, draft.trie.next_node) if node in draft.trie)]
    for node in draw.sample(nodes, draw.randint(1, min(len(nodes), 3))):
        if len(draft.trie.path(node)) > 5:
            continue
        (found,) = model.forward([Row(draft, node)])
        assert found is not None and found.tokens[0] == logits_of(text_of(draft, node)).argmax()
        for token in found.tokens[: draw.randint(1, 2)].tolist():
            follow(draft, node, token)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_sees_its_text_and_its_path(model, seed):
    draw = random.Random(seed)
    drafts = [opened(draw, model) for _ in range(2)]
    for _ in range(30):
        at = draw.randrange(2)
        if drafts[at].text.length > 35:
            model.close(drafts[at])
            drafts[at] = opened(draw, model)
        run(draw, model, drafts[at])
        if draw.random() < 0.5:
            goes_on(draw, model, drafts[at])


def test_rows_of_several_sessions_in_one_forward(model):
    draw = random.Random(0)
    drafts = [opened(draw, model) for _ in range(2)]
    for _ in range(6):
        rows = [
            Row(draft, node)
            for draft in drafts
            for node in [draft.trie.root, *(node for node, _, _ in draft.trie.children(draft.trie.root))]
        ]
        for (draft, node), found in zip(rows, model.forward(rows), strict=True):
            assert found.tokens[0] == logits_of(text_of(draft, node)).argmax()
            follow(draft, node, int(found.tokens[0]))


@pytest.mark.parametrize(("context", "slots"), [(0, SLOTS), (CONTEXT, SPARE)])
def test_a_context_or_cache_in_which_no_text_has_room_stops_the_start(context, slots):
    with pytest.raises(
        ValueError, match=rf"context \({context + SPARE}\).*--specstore-draft-tokens, {slots}"
    ):
        SglangModel(Runner(context, slots), ROWS, CHUNK, VOCABULARY)
