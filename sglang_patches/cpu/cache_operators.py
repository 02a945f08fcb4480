"""KV-cache slot bookkeeping: the CPU operators that read and write `req_to_token` and move KV rows.

`req_to_token` is SGLang's int32 table [requests, context]: the KV-cache slot of every position of every request.
Each function takes torch tensors, writes its result in place and matches the operator of the same name that
SGLang calls through `sgl_kernel`; the loops are Numba kernels because the arrays are tiny and launch cost dominates.
"""

import numba
import numpy as np
import torch

from sglang_patches.cpu.kernels import pointer


@numba.njit(cache=True, nogil=True)
def _check_rows(req_to_token, requests, starts, ends):
    for i in range(requests.shape[0]):
        if requests[i] < 0 or requests[i] >= req_to_token.shape[0]:
            raise IndexError("req_pool_indices: a request is outside req_to_token")
        if starts[i] < 0 or ends[i] > req_to_token.shape[1]:
            raise IndexError("start_offset/end_offset: outside a row of req_to_token")


@numba.njit(cache=True, nogil=True)
def _gather_slots(requests, req_to_token, starts, ends, out):
    """out = req_to_token[request, start:end] of every request, one after another."""
    _check_rows(req_to_token, requests, starts, ends)
    at = 0
    for i in range(requests.shape[0]):
        if at + ends[i] - starts[i] > out.shape[0]:
            raise IndexError("out_cache_loc: shorter than the ranges to read")
        for position in range(starts[i], ends[i]):
            out[at] = req_to_token[requests[i], position]
            at += 1


@numba.njit(cache=True, nogil=True)
def _scatter_slots(requests, req_to_token, starts, ends, slots):
    """req_to_token[request, start:end] = the next slots, request after request."""
    _check_rows(req_to_token, requests, starts, ends)
    at = 0
    for i in range(requests.shape[0]):
        if at + ends[i] - starts[i] > slots.shape[0]:
            raise IndexError("out_cache_loc: shorter than the ranges to write")
        for position in range(starts[i], ends[i]):
            req_to_token[requests[i], position] = slots[at]
            at += 1


@numba.njit(cache=True, nogil=True)
def _compact_accepted(accept_index, slots, out):
    at = 0
    for node in accept_index:
        if node >= slots.shape[0]:
            raise IndexError("accept_index: a node is outside out_cache_loc")
        if node >= 0:
            out[at] = slots[node]
            at += 1


@numba.njit(cache=True, nogil=True)
def _copy_rows(addresses, strides, targets, sources):
    """Copy row `sources[i]` to `targets[i]` in every buffer. All rows are read before any is written."""
    staging = np.empty((sources.shape[0], strides.max()), np.uint8)
    last = max(targets.max(), sources.max())
    for buffer in range(addresses.shape[0]):
        width = strides[buffer]
        rows = numba.carray(pointer(addresses[buffer]), (last + 1, width), np.uint8)
        for i in range(sources.shape[0]):
            staging[i, :width] = rows[sources[i]]
        for i in range(targets.shape[0]):
            rows[targets[i]] = staging[i, :width]


@numba.njit(cache=True, nogil=True)
def _last_accepted(tokens, accept_lens, out, stride):
    for i in range(accept_lens.shape[0]):
        out[i] = tokens[i * stride + accept_lens[i] - 1]


@numba.njit(cache=True, nogil=True)
def _rotate_left(ids, starts, lengths, last_tokens, last_positions):
    """Shift each segment of `ids` left by one and put its new token at `last_positions`."""
    for i in range(lengths.shape[0]):
        if lengths[i] <= 0:
            continue
        for at in range(starts[i], starts[i] + lengths[i] - 1):
            ids[at] = ids[at + 1]
        ids[last_positions[i]] = last_tokens[i]


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of positions [start, end) of every request [bs] into `out_cache_loc`, concatenated."""
    _gather_slots(
        req_pool_indices.numpy(),
        req_to_token.numpy(),
        start_offset.numpy(),
        end_offset.numpy(),
        out_cache_loc.numpy(),
    )


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write each request's `topk * num_steps` slots after its `seq_lens` into `out_cache_loc`."""
    starts = seq_lens.numpy()
    _gather_slots(
        req_pool_indices.numpy(),
        req_to_token.numpy(),
        starts,
        starts + topk * num_steps,
        out_cache_loc.numpy(),
    )


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Record freshly allocated slots as positions [start, end) of every request [bs]."""
    _scatter_slots(
        req_pool_indices.numpy(),
        req_to_token.numpy(),
        start_offset.numpy(),
        end_offset.numpy(),
        out_cache_loc.numpy(),
    )


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted nodes (`accept_index` entries that are not -1) to the front of the output."""
    _compact_accepted(accept_index.reshape(-1).numpy(), out_cache_loc.numpy(), accept_out_cache_loc.numpy())


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """bonus_tokens[i] = the last of the `accept_lens[i]` tokens in row i (`accept_stride` wide)."""
    _last_accepted(
        accept_tokens.reshape(-1).numpy(), accept_lens.numpy(), bonus_tokens.numpy(), accept_stride
    )


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV rows between slots in every layer's buffer.

    `data_ptrs` [buffers] are base addresses, `strides` [buffers] the bytes of one slot; the buffers belong to the
    KV pool that calls. Source and target may overlap: the copy behaves as if all rows were read first.
    """
    if len(tgt_loc) != len(src_loc):
        raise ValueError(f"tgt_loc has {len(tgt_loc)} slots, src_loc {len(src_loc)}: they must be equal")
    if len(src_loc) == 0:
        return
    if min(int(tgt_loc.min()), int(src_loc.min())) < 0:
        raise IndexError("tgt_loc/src_loc: negative slot")
    addresses = data_ptrs.numpy().astype(np.uint64)
    _copy_rows(addresses, strides.numpy().astype(np.int64), tgt_loc.numpy(), src_loc.numpy())


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's segment of `input_ids` left by one; its new token goes to the end or `select_index`."""
    starts, lengths = extend_start_loc.numpy(), extend_seq_lens.numpy()
    last = starts + lengths - 1 if select_index is None else select_index.numpy()
    _rotate_left(input_ids.numpy(), starts, lengths, topk_index.reshape(-1).numpy(), last)
