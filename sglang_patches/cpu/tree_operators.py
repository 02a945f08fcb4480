"""Draft trees on the CPU: build their masks and links, recover the links from a mask, verify greedily.

A tree of `n` nodes per request is stored as SGLang stores it. Node 0 is the root (the token already accepted).
`next_token[i]` is node i's first child, `next_sibling[i]` the next child of its parent, -1 where there is none;
`index[b, i] = b * n + i`. `mask[i, j]` says that node i sees node j (its ancestors and itself).
"""

import numba
import numpy as np
import torch

FULL_MASK = 0
QLEN_ONLY = 1


@numba.njit(cache=True, nogil=True)
def _links_from_mask(mask, seq_lens, positions, index, next_token, next_sibling):
    """The parent of a node is its nearest earlier ancestor; children are linked in node order."""
    batch, n, _ = mask.shape
    for b in range(batch):
        for i in range(n - 1, -1, -1):
            index[b, i] = b * n + i
            next_token[b, i] = -1
            next_sibling[b, i] = -1
            positions[b, i] = seq_lens[b]
        for i in range(n - 1, -1, -1):
            parent = -1
            for j in range(i):
                if mask[b, i, j]:
                    parent = j
                    positions[b, i] += 1
            if parent >= 0:
                next_sibling[b, i] = next_token[b, parent]
                next_token[b, parent] = i


@numba.njit(cache=True, nogil=True)
def _accept_greedily(
    predicts, accept_index, accept_count, candidates, index, next_token, next_sibling, target
):
    batch, n = candidates.shape
    target_flat = target.reshape(-1)
    for b in range(batch):
        last = index[b, 0]
        accept_index[b, 0] = last
        accepted = 0
        node = next_token[b, 0]
        while node != -1 and accepted + 1 < accept_index.shape[1]:
            if candidates[b, node] == target_flat[last]:
                predicts[last] = target_flat[last]
                last = index[b, node]
                accepted += 1
                accept_index[b, accepted] = last
                node = next_token[b, node]
            else:
                node = next_sibling[b, node]
        accept_count[b] = accepted
        predicts[last] = target_flat[last]


@numba.njit(cache=True, nogil=True)
def _parent_node(parents, selected, node, topk):
    """Parent of tree node `node` >= 1, from the scoring tables of the draft expansion; -1 if it was not selected."""
    slot = selected[node - 1] // topk
    if slot == 0:
        return 0
    for other in range(selected.shape[0]):
        if selected[other] == parents[slot]:
            return other + 1
    return -1


@numba.njit(cache=True, nogil=True)
def _write_row(row, path_start, parent_of, depth):
    """Mark node `path_start` and its ancestors (the root always) in one mask row; returns its depth."""
    row[:] = False
    row[0] = True
    node, level = path_start, 0
    while node > 0 and level < depth:
        row[node] = True
        level += 1
        node = parent_of[node]
    return level


@numba.njit(cache=True, nogil=True)
def _build(
    parents, selected, seq_lens, mask, positions, index, next_token, next_sibling, topk, depth, n, full
):
    parent_of = np.empty(n, np.int64)
    start = 0
    for b in range(seq_lens.shape[0]):
        prefix = seq_lens[b] if full else 0
        for i in range(n):
            index[b, i] = b * n + i
            parent_of[i] = _parent_node(parents[b], selected[b], i, topk) if i else -1
        for i in range(n - 1, 0, -1):
            if parent_of[i] >= 0:
                if next_token[b, parent_of[i]] != -1:
                    next_sibling[b, i] = next_token[b, parent_of[i]]
                next_token[b, parent_of[i]] = i
        for i in range(n):
            row = mask[start + prefix : start + prefix + n]
            positions[b * n + i] = seq_lens[b] + _write_row(row, i, parent_of, depth)
            start += prefix + n


def reconstruct_indices_from_tree_mask_cpu(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Recover positions and links [bs, n] from a mask of bs * n * n bools; nodes come parents first."""
    shape = (batch_size, draft_token_num)
    _links_from_mask(
        tree_mask.view(*shape, draft_token_num).numpy(),
        verified_seq_len.numpy(),
        positions.view(shape).numpy(),
        retrive_index.view(shape).numpy(),
        retrive_next_token.view(shape).numpy(),
        retrive_next_sibling.view(shape).numpy(),
    )


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree along the target's own argmax tokens and accept the path that agrees.

    candidates, retrive_*, target_predict: [bs, n]. Writes `accept_index` [bs, depth] (flat node ids, root first),
    `accept_token_num` [bs] (drafted tokens accepted) and, in `predicts` [bs * n], the target's token at every
    accepted node, which includes the bonus token after the last one.
    """
    _accept_greedily(
        predicts.numpy(),
        accept_index.numpy(),
        accept_token_num.numpy(),
        candidates.numpy(),
        retrive_index.numpy(),
        retrive_next_token.numpy(),
        retrive_next_sibling.numpy(),
        target_predict.contiguous().numpy(),
    )


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Build mask, positions and links of the trees a top-k draft expansion selected.

    `selected_index` [bs, n - 1] are the chosen candidates in the expansion's numbering and `parent_list` [bs, m] maps
    `candidate // topk` to the candidate it grew from (0: the root). In FULL_MASK mode a row of `tree_mask` also
    spans the request's prefix, whose cells the caller has filled. The link tables arrive filled with -1.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            f"specstore: tree_mask_mode {tree_mask_mode} is not supported on CPU: use FULL_MASK or QLEN_ONLY"
        )
    _build(
        parent_list.numpy(),
        selected_index.numpy(),
        verified_seq_len.numpy(),
        tree_mask.numpy(),
        positions.numpy(),
        retrive_index.numpy(),
        retrive_next_token.numpy(),
        retrive_next_sibling.numpy(),
        topk,
        depth,
        draft_token_num,
        tree_mask_mode == FULL_MASK,
    )
