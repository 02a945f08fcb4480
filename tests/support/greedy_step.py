"""One verification of draft trees, by the product's own code, where a function of the text is the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from datastore_service.protocol.tree import DraftTree
from sglang_patches.cpu.tree_operators import verify_tree_greedy_cpu
from sglang_patches.verification.layout import PADDING, lay_out, pack
from tests.support.agreeing_model import target


def emitted_greedily(trees: Sequence[DraftTree], texts: Sequence[list[int]], width: int) -> list[list[int]]:
    """What each text goes on with. Asserts that it is what plain decoding emits."""
    packed, batch = pack(trees, width), len(trees)
    layout = lay_out(
        packed, np.array([text[-1] for text in texts]), np.array([len(text) - 1 for text in texts])
    )
    predicts = torch.zeros(batch * width, dtype=torch.int32)
    accepted = torch.full((batch, width), -1, dtype=torch.int32)
    counts = torch.zeros(batch, dtype=torch.int32)
    links = (layout.retrieve_index, layout.next_token, layout.next_sibling)
    verify_tree_greedy_cpu(
        predicts,
        accepted,
        counts,
        torch.from_numpy(layout.tokens).view(batch, width),
        *map(torch.from_numpy, links),
        torch.tensor([_target_of_rows(tree, text) for tree, text in zip(packed, texts, strict=True)]),
    )
    emitted = [
        predicts[rows[: count + 1].long()].tolist()
        for rows, count in zip(accepted, counts.tolist(), strict=True)
    ]
    for text, tokens in zip(texts, emitted, strict=True):
        assert tokens == _plain(text, len(tokens))
    return emitted


def _target_of_rows(packed: np.ndarray, text: list[int]) -> list[int]:
    """packed: int32 [2, width - 1]."""
    rows = [text]
    for token, parent in packed.T.tolist():
        rows.append(text if parent == PADDING else [*rows[parent + 1], token])
    return list(map(target, rows))


def _plain(text: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(target([*text, *tokens]))
    return tokens
