"""Top-k, top-p and min-p as SGLang's sampler applies them, with the result in the order of the token ids.

SGLang sorts, filters and draws among ranks (`layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch`), or draws in a
kernel that never writes the filtered distribution (FlashInfer). Noise that belongs to token ids needs it written.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

_FLOOR = 2.0**-10  # of the likeliest token's probability: those above it are ranked first


def keep_filtered(
    probabilities: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    *,
    most: int | None = None,
    flashinfer: bool = False,
) -> torch.Tensor:
    """What SGLang's sampler keeps of the probabilities after temperature, float32 [rows, vocab], made to sum to 1.

    All filters look at the same probabilities: a token stays if fewer than top-k are likelier, those have a mass of at most
    top-p, and it has at least min-p of the likeliest token's probability. Of tokens that tie at the last place the first ids
    stay, so that at most top-k do.

    top_ks, top_ps, min_ps: [rows]; None if no row asks for that filter, which saves work. most: the largest of `top_ks`, None if
    the host does not know it; without it an accelerator sorts whole rows. flashinfer: filter as FlashInfer's kernels do, SGLang's
    default on CUDA: all that tie at the last place stay, the likelier ones have a mass below top-p, and in a row with min-p top-p is a
    share of the mass that top-k left.
    """
    probabilities = probabilities.float()
    rows, vocab = probabilities.shape
    device = probabilities.device
    if top_ks is None and top_ps is None:
        if min_ps is None:
            return probabilities
        least = probabilities.amax(dim=-1, keepdim=True) * min_ps.view(-1, 1)
        return _rescaled(probabilities * (probabilities >= least))
    # Of the mass that top-k leaves, all that tie at its last place are part.
    width = vocab if most is None or (flashinfer and min_ps is not None) else min(most, vocab)
    top_ks = torch.full((rows,), vocab, device=device) if top_ks is None else top_ks
    top_ps = torch.ones(rows, device=device) if top_ps is None else top_ps
    min_ps = torch.zeros(rows, device=device) if min_ps is None else min_ps
    if device.type == "cpu":
        return _keep_on_host(probabilities, top_ks, top_ps, min_ps, flashinfer)
    return _keep_on_device(probabilities, top_ks, top_ps, min_ps, flashinfer, width)


def _keep_on_device(
    probabilities: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    flashinfer: bool,
    width: int,
) -> torch.Tensor:
    """Filters as `keep_filtered` does, on an accelerator.

    width: number of the likeliest tokens that are ranked.
    """
    ranked = probabilities.topk(width).values
    top_ks = top_ks.long().clamp(max=width).view(-1, 1)
    stays = torch.arange(width, device=ranked.device) < top_ks
    limits = top_ps
    if flashinfer:
        mass = torch.where(ranked >= ranked.gather(1, top_ks - 1), ranked, 0).sum(dim=-1)
        limits = torch.where(min_ps > 0, top_ps * mass, top_ps)
    limits = torch.where(top_ps < 1, limits, torch.inf)  # a sum may round to more than 1
    before, limits = ranked.cumsum(dim=-1) - ranked, limits.view(-1, 1)
    stays &= before < limits if flashinfer else before <= limits
    count = stays.sum(dim=-1, keepdim=True)
    last = ranked.gather(1, count - 1)
    kept = probabilities >= last
    if not flashinfer:
        likelier = probabilities > last
        tied = (kept ^ likelier).cumsum(dim=-1, dtype=torch.int32)
        kept = likelier | (kept & (tied <= count - likelier.sum(dim=-1, keepdim=True)))
    kept &= probabilities >= ranked[:, :1] * min_ps.view(-1, 1)
    return _rescaled(probabilities * kept)


def _rescaled(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


def _keep_on_host(
    probabilities: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    flashinfer: bool,
) -> torch.Tensor:
    """Ranks no more tokens than it needs: a CPU sorts whole rows in milliseconds each."""
    kept = np.empty(probabilities.shape, np.float32)
    arrays = (x.contiguous().numpy() for x in (probabilities, top_ks.long(), top_ps, min_ps))
    _keep_rows(*arrays, flashinfer, kept)
    return torch.from_numpy(kept)


@numba.njit(cache=True, nogil=True)
def _keep_rows(probabilities, top_ks, top_ps, min_ps, flashinfer, kept):  # pragma: no cover
    rows, vocab = probabilities.shape
    ranked = np.empty(vocab, np.float32)
    for row in range(rows):
        of_row, out = probabilities[row], kept[row]
        likeliest = of_row.max()
        if np.isnan(likeliest):  # no filter ends at a place; whoever draws from the row sees it
            out[:] = likeliest
            continue
        last, places = np.float32(-1), vocab
        if top_ks[row] < vocab or top_ps[row] < 1:
            rescaled = flashinfer and min_ps[row] > 0
            limits = top_ks[row], top_ps[row]
            last, places = _last_place(of_row, likeliest, limits, rescaled, flashinfer, ranked)
        least = max(last, likeliest * min_ps[row])
        total, tied = 0.0, 0
        for token in range(vocab):
            out[token] = of_row[token] if of_row[token] >= least else np.float32(0)
            total += out[token]
            tied += of_row[token] == last
        if tied > places and last >= least and not flashinfer:
            total -= last * (tied - places)
            for token in range(vocab):
                if of_row[token] == last:
                    places -= 1
                    if places < 0:
                        out[token] = 0
        for token in range(vocab):
            out[token] /= np.float32(total)


@numba.njit
def _last_place(probabilities, likeliest, limits, rescaled, below, ranked):  # pragma: no cover
    """The probability of the last token that top-k and top-p keep, and how many they keep of those that tie there. Ranks the
    tokens above a floor, and lowers it until they are enough. below: as of `_count`. ranked: room for all."""
    top_k, top_p = limits
    share = np.float32(_FLOOR)
    while True:
        size = 0
        for value in probabilities:
            if value >= likeliest * share:
                ranked[size] = value
                size += 1
        leading = ranked[:size]
        leading.sort()
        limit = top_p if top_p < 1 else np.float32(np.inf)
        if rescaled:
            limit *= np.float32(leading[leading >= leading[max(size - top_k, 0)]].sum())
        count = _count(leading, top_k, limit, below)
        if size == len(probabilities) or count == top_k or (count < size and not (rescaled and size < top_k)):
            break
        share *= share  # in the end 0
    last = leading[size - count]
    places = 1
    while places < count and leading[size - count + places] == last:
        places += 1
    return last, places


@numba.njit
def _count(ascending, top_k, limit, below):  # pragma: no cover
    """How many of the likeliest stay. below: those before the last have a mass below the limit, else at most the limit."""
    size, count, mass = len(ascending), 0, 0.0
    while count < min(size, top_k):
        value = ascending[size - 1 - count]
        mass += value  # in double precision, rounded when compared, as torch's cumulative sum is
        before = np.float32(mass) - value
        if before > limit or (below and before == limit):
            break
        count += 1
    return count
