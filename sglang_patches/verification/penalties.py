"""Frequency, presence and repetition penalties and min_new_tokens at every node of the batch's trees.

The formulas are those of ``sglang.srt.sampling.penaltylib``, over all tokens generated before the node: the request's
output, then the path to the node. Only the logits of generated tokens change, so only they are touched. A repeated
token's frequency penalty is a sum of float32 terms, as the running scatter-add of plain decoding makes it.
The reference is plain decoding without overlap scheduling; with it, SGLang's penalties lag one token behind and
count the prompt's last token.

Tokens are counted on the host, which has the trees; what the device gets is one table, and it is never read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch
from sglang.srt.utils import is_pin_memory_available

from sglang_patches.verification.layout import TreeLayout

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Columns of a table of changed logits, int32. The last two hold float32.
_PLACE, _TOKEN, _ADDITIVE, _SCALE = range(4)
_COLUMNS = 4


def has_penalties(req: Req) -> bool:
    """Whether the request's logits depend on the tokens it has generated."""
    return _counts_tokens(req) or req.sampling_params.min_new_tokens > 0


def penalise(
    logits: torch.Tensor,
    reqs: Sequence[Req],
    pending: Sequence[Sequence[int]] | None,
    layout: TreeLayout,
) -> None:
    """Changes logits ``[rows, vocab]`` in place, without a host synchronisation.

    pending: per request, accepted tokens that are not in ``req.output_ids`` yet (overlap scheduling: the last step's); None if
    there are none.
    """
    penalised = [r for r, req in enumerate(reqs) if has_penalties(req)]
    if not penalised:
        return
    generated = [_generated(reqs[r], pending[r] if pending else ()) for r in penalised]
    counting = [i for i, r in enumerate(penalised) if _counts_tokens(reqs[r])]
    shared, paths = _counted(
        [reqs[penalised[i]] for i in counting],
        [generated[i] for i in counting],
        np.array([penalised[i] for i in counting], np.int64),
        layout,
        logits.shape[1],
    )
    stops = [
        _too_early(reqs[r], r, len(tokens), layout, logits.shape[1])
        for r, tokens in zip(penalised, generated, strict=True)
    ]
    parts = [shared, paths, np.concatenate(stops)]
    table = _to_device(np.concatenate(parts), logits.device)
    parts = table.split([len(part) for part in parts])
    if layout.uniform:
        by_request = torch.arange(len(logits), device=logits.device).view(layout.next_token.shape)
    else:
        by_request = torch.from_numpy(layout.rows_of_nodes).to(logits.device)
    _apply(logits, by_request, *parts)


def _apply(
    logits: torch.Tensor,
    by_request: torch.Tensor,
    shared: torch.Tensor,
    paths: torch.Tensor,
    stops: torch.Tensor,
) -> None:
    """Changes the logits in place, by the three tables. Places of `shared` are requests, of the others rows.

    by_request: int64 ``[requests, nodes]``, rows; some may stand twice.
    """
    rows, tokens = _where(paths)
    # Read before the tokens of the output are penalised: some stand in both tables.
    on_path = _penalised(logits[rows, tokens], paths)
    requests, ids = _where(shared)
    everywhere = by_request[requests].T, ids
    logits[everywhere] = _penalised(logits[everywhere], shared)
    logits[rows, tokens] = on_path
    logits[_where(stops)] = float("-inf")


def _where(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return table[:, _PLACE].long(), table[:, _TOKEN].long()


def _penalised(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The values with the penalties of the table's entries.

    values: ``[..., entries]``.
    """
    additive, scale = table[:, _ADDITIVE:].view(torch.float32).unbind(1)
    moved = (values + additive).to(values.dtype)
    return torch.where(moved < 0, moved * scale, moved / scale).to(values.dtype)


def _to_device(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies a table to the device from pinned memory: a copy from any other waits for the forward."""
    tensor = torch.from_numpy(table)
    if is_pin_memory_available(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _counts_tokens(req: Req) -> bool:
    p = req.sampling_params
    return p.frequency_penalty != 0.0 or p.presence_penalty != 0.0 or p.repetition_penalty != 1.0


def _generated(req: Req, pending: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in (req.output_ids, pending)])


def _counted(
    reqs: Sequence[Req],
    generated: Sequence[np.ndarray],
    requests: np.ndarray,
    layout: TreeLayout,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Tables of the tokens in the requests' outputs, which change in all nodes of a request, and of those on the nodes' paths.

    requests: rows of `reqs` in the batch."""
    size, width = layout.next_token.shape
    sizes = np.array([len(tokens) for tokens in generated], np.int64)
    params = [req.sampling_params for req in reqs]
    penalties = np.array(
        [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in params], np.float32
    ).reshape(-1, 3)
    on_paths = int(layout.mask[requests, 1:, 1:].sum())
    shared, paths = (np.empty((most, _COLUMNS), np.int32) for most in (sizes.sum(), on_paths))
    counts = _count(
        np.concatenate([*generated, np.empty(0, np.int64)]),
        sizes,
        requests,
        penalties,
        layout.tokens.reshape(size, width),
        layout.mask,
        layout.widths,
        layout.first_rows,
        np.full(vocab_size, -1, np.int32),
        shared,
        shared[:, _ADDITIVE:].view(np.float32),
        paths,
        paths[:, _ADDITIVE:].view(np.float32),
    )
    return shared[: counts[0]], paths[: counts[1]]


@numba.njit(cache=True, nogil=True)
def _count(
    generated,
    sizes,
    requests,
    penalties,
    tokens,
    mask,
    widths,
    first_rows,
    found,
    shared,
    shared_reals,
    paths,
    paths_reals,
):  # pragma: no cover
    """Fills the tables; returns their sizes. found: -1 for each id of the vocabulary."""
    # Frequency penalties, summed term by term as plain decoding adds them.
    sums = np.zeros(len(shared), np.float32)
    entries, on_paths, begin = 0, 0, 0
    for i in range(len(sizes)):
        request, first = requests[i], entries
        frequency, presence, scale = penalties[i]
        for at in range(begin, begin + sizes[i]):
            token = generated[at]
            if found[token] < 0:
                found[token] = entries
                shared[entries, 0], shared[entries, 1] = request, token
                entries += 1
            sums[found[token]] += frequency
        begin += sizes[i]
        for entry in range(first, entries):
            shared_reals[entry, 0], shared_reals[entry, 1] = -sums[entry] - presence, scale
        for node in range(1, widths[request]):
            for above in range(1, node + 1):  # what a node attends to is its path
                token = tokens[request, above]
                if not mask[request, node, above] or _is_earlier(tokens, mask, request, node, above):
                    continue
                total = sums[found[token]] if found[token] >= 0 else np.float32(0)
                for same in range(above, node + 1):
                    if mask[request, node, same] and tokens[request, same] == token:
                        total += frequency
                paths[on_paths, 0], paths[on_paths, 1] = first_rows[request] + node, token
                paths_reals[on_paths, 0], paths_reals[on_paths, 1] = -total - presence, scale
                on_paths += 1
        for entry in range(first, entries):
            found[shared[entry, 1]] = -1
    return entries, on_paths


@numba.njit
def _is_earlier(tokens, mask, request, node, place):  # pragma: no cover
    """Whether the token at that place of the node's path is on it before."""
    for before in range(1, place):
        if mask[request, node, before] and tokens[request, before] == tokens[request, place]:
            return True
    return False


def _too_early(req: Req, request: int, generated: int, layout: TreeLayout, vocab_size: int) -> np.ndarray:
    """Table of the ids that would end the request at nodes where it must not end yet."""
    depths = layout.mask[request, : layout.widths[request], 1:].sum(axis=1)
    nodes = np.flatnonzero(generated + depths < req.sampling_params.min_new_tokens)
    stop_ids = _stop_token_ids(req, vocab_size) if len(nodes) else []
    table = np.zeros((len(nodes) * len(stop_ids), _COLUMNS), np.int32)
    table[:, _PLACE] = np.repeat(layout.first_rows[request] + nodes, len(stop_ids))
    table[:, _TOKEN] = np.tile(np.array(stop_ids, np.int32), len(nodes))
    return table


def _stop_token_ids(req: Req, vocab_size: int) -> list[int]:
    """Those that the model can say. A client, or a tokenizer with more tokens than the model, may name others."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return sorted(token for token in ids - {None} if 0 <= token < vocab_size)
