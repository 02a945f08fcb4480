"""The kernels of a verification step on a device, each compared with the same computation on the host."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache

from sglang_patches.verification.layout import TreeLayout, full_mask, lay_out
from sglang_patches.verification.shared_noise import SEED_BITS, draw, exponentials
from sglang_patches.verification.verifier import HostTrees, verify_tree_greedy_func

WIDTHS = (1, 2, 4, 16, 64)
REQUESTS = 5
VOCABULARY = 1000


def _random_layout(width: int, lengths: np.ndarray, seed: int) -> TreeLayout:
    """Random trees with some padding. The vocabulary has four tokens, so that targets follow a tree for a few nodes."""
    random = np.random.default_rng(seed)
    packed = np.zeros((len(lengths), 2, width - 1), np.int32)
    packed[:, 1] = -2
    for tree in packed:
        nodes = int(random.integers(0, width))
        tree[0, :nodes] = random.integers(0, 4, nodes)
        tree[1, :nodes] = [random.integers(-1, node) for node in range(nodes)]
    return lay_out(packed, np.zeros(len(lengths), np.int64), lengths)


def _lengths(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 90, REQUESTS)


def tree_walk(device: str) -> str | None:
    """SGLang's kernel walks down the tree as the host does."""
    for width in WIDTHS:
        layout = _random_layout(width, _lengths(width), seed=width)
        target = torch.from_numpy(np.random.default_rng(width).integers(0, 4, (REQUESTS, width)))
        index = verify_on(device, layout, target)
        for request in range(REQUESTS):
            expected = _walk_on_host(layout, target, request)
            found = [row for row in index[request].tolist() if row >= 0]
            if found != expected:
                return f"width {width}: accepts rows {found} where {expected} are right"
    return None


def verify_on(device: str, layout: TreeLayout, target: torch.Tensor) -> torch.Tensor:
    """int32 [requests, width] accepted rows, then -1. target: int64 [requests, width], the target's token at each node."""
    requests, width, _ = layout.mask.shape
    links = (layout.retrieve_index, layout.next_token, layout.next_sibling)
    retrieve_index, next_token, next_sibling = (torch.from_numpy(link).to(device) for link in links)
    _, index, _ = verify_tree_greedy_func(
        predicts=torch.zeros(requests * width, dtype=torch.int32, device=device),
        accept_index=torch.full((requests, width), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(requests, dtype=torch.int32, device=device),
        candidates=torch.from_numpy(layout.tokens).view(requests, width).to(device),
        retrieve_index=retrieve_index,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
        target_predict=target.to(device),
        topk=-1,
    )
    return index.cpu()


def _walk_on_host(layout: TreeLayout, target: torch.Tensor, request: int) -> list[int]:
    trees = HostTrees.of(layout)
    node, rows = 0, []
    while node >= 0:
        rows.append(trees.rows[request][node])
        node = trees.child_with_token(request, node, int(target[request, node]))
    return rows


def cache_slots(device: str) -> str | None:
    """The KV slots of a tree's rows are read from the requests' rows."""
    table = torch.randperm(8 * 256, dtype=torch.int32).view(8, 256)
    rows = torch.tensor([6, 1, 3, 2, 5])
    for width in WIDTHS:
        starts = torch.from_numpy(_lengths(width))
        found = assign_extend_cache_locs_func(
            req_pool_indices=rows.to(device),
            req_to_token=table.to(device),
            start_offset=starts.to(device),
            end_offset=(starts + width).to(device),
            batch_size=len(rows),
            draft_token_num=width,
            device=device,
        ).cpu()
        expected = torch.cat(
            [table[row, start : start + width] for row, start in zip(rows, starts, strict=True)]
        )
        if not torch.equal(found.long(), expected.long()):
            return f"width {width}: wrong slots"
    return None


def tree_masks(device: str) -> str | None:
    """The mask that attention takes holds each tree behind its request's cached tokens."""
    for width in WIDTHS:
        lengths = _lengths(width)
        layout = _random_layout(width, lengths, seed=width)
        cached = [np.ones((width, length), np.bool_) for length in lengths]
        rows = [np.hstack([seen, tree]).ravel() for seen, tree in zip(cached, layout.mask, strict=True)]
        if not np.array_equal(full_mask(layout.mask, lengths, device).cpu().numpy(), np.concatenate(rows)):
            return f"width {width}: wrong mask"
    return None


def _table(lengths: torch.Tensor, slots: torch.Tensor, width: int) -> torch.Tensor:
    """int32 [requests, positions] the slots of each request's rows behind its cached tokens."""
    table = torch.zeros(len(lengths), int(lengths.max()) + width, dtype=torch.int32)
    for row, start, own in zip(table, lengths.tolist(), slots.view(-1, width), strict=True):
        row[start : start + width] = own
    return table


class _Cache:
    """One layer of a KV cache, with the interface through which accepted rows are moved."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def get_kvcache(self) -> _Cache:
        return self

    def move_kv_cache(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.values[target.long()] = self.values[source.long()].clone()


def moved_rows(device: str) -> str | None:
    """The accepted rows' KV is moved behind the cached tokens, in order."""
    for width in WIDTHS[1:]:
        layout = _random_layout(width, _lengths(width), seed=width)
        target = torch.from_numpy(np.random.default_rng(width).integers(0, 4, (REQUESTS, width)))
        index = verify_on(device, layout, target)
        slots = torch.randperm(REQUESTS * width) + 1
        cache = _Cache(torch.arange(REQUESTS * width + 1, device=device))
        lengths = torch.from_numpy(_lengths(width))
        batch = SimpleNamespace(
            seq_lens=lengths.to(device),
            out_cache_loc=slots.to(device),
            # Some versions of SGLang look the slots up here.
            req_pool_indices=torch.arange(REQUESTS, device=device),
            req_to_token_pool=SimpleNamespace(req_to_token=_table(lengths, slots, width).to(device)),
        )
        accepted = (index >= 0).sum(1)
        move_accept_tokens_to_target_kvcache(batch, index.to(device), (accepted - 1).int().to(device), cache)
        for request in range(REQUESTS):
            count = int(accepted[request])
            first = slots[request * width : request * width + count]
            expected = slots[index[request, :count].long()]
            if not torch.equal(cache.values.cpu()[first], expected):
                return f"width {width}: accepted rows end in wrong slots"
    return None


def shared_noise(device: str) -> str | None:
    """The noise that target and draft share is the same on the device as on the host."""
    random = np.random.default_rng(0)
    seeds = torch.from_numpy(random.integers(0, 1 << SEED_BITS, REQUESTS))
    positions = torch.from_numpy(_lengths(0))
    probabilities = torch.from_numpy(random.dirichlet(np.ones(VOCABULARY), REQUESTS)).float()
    noise = exponentials(seeds.to(device), positions.to(device), VOCABULARY)
    found = (probabilities.to(device) / noise).argmax(-1).cpu()
    expected = draw(probabilities, seeds, positions)
    return (
        None
        if torch.equal(found, expected)
        else f"draws {found.tolist()} where {expected.tolist()} are right"
    )


CHECKS = {
    "kernel: walk down the tree": tree_walk,
    "kernel: KV slots of a tree": cache_slots,
    "kernel: move of accepted rows": moved_rows,
    "tree masks": tree_masks,
    "shared noise": shared_noise,
}
