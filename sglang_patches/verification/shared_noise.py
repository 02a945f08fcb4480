"""Draws with noise that the target shares with its drafts: Gumbel-max coupling (Daliri et al., arXiv 2408.07978).

The token at index i of a sequence (i tokens come before it) is ``argmax_v p(v) / E(seed, i, v)``. p is the distribution after the
request's own filters. E is an exponential variate, and ``-log E`` is Gumbel noise. The draw is exact: over random seeds the token
has the distribution p. Whoever knows the seed and has nearly the same p nearly always draws the same token. So target and draft
agree about as often as their distributions allow, and neither needs the other's.

E is a function of integers alone. A CPU and an accelerator have the same 32 random bits for a token, and the same E up to a
rounding of the logarithm.
"""

from __future__ import annotations

import numba
import numpy as np
import torch

from sglang_patches.verification.filters import keep_filtered

NO_NOISE = -1  # as a seed: the likeliest token
SEED_BITS = 63

_BLOCK = 256  # tokens that are looked at together
# Bounds the memory of the hash on an accelerator: some arrays of 8 bytes a row and token.
_ROWS_AT_ONCE = 64
_LOW = 0xFFFFFFFF
_BELOW_ONE = 1 - 2.0**-24  # the largest float32


def filtered_probabilities(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    *,
    most: int | None = None,
    flashinfer: bool = False,
) -> torch.Tensor:
    """The distributions that plain decoding draws from, float32 [rows, vocab], in the order of the token ids.

    logits: [rows, vocab]. temperatures: [rows], above 0. For the other arguments see `filters.keep_filtered`.
    """
    probabilities = torch.softmax(logits.float() / temperatures.view(-1, 1), dim=-1)
    return keep_filtered(probabilities, top_ks, top_ps, min_ps, most=most, flashinfer=flashinfer)


def draw(probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token a row, int64 [rows], without a host synchronisation.

    probabilities: [rows, vocab] in the order of the token ids; they need not sum to 1. seeds: int64 [rows], of SEED_BITS bits, or
    NO_NOISE for the likeliest token. positions: int64 [rows], index in its sequence of the token that is drawn.
    """
    if probabilities.device.type == "cpu":
        return best(probabilities, seeds, positions, 1)[0].view(-1)
    return _scores(probabilities, seeds, positions).argmax(dim=-1)


def best(
    probabilities: torch.Tensor, seeds: torch.Tensor | None, positions: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tokens in the order of p / E, best first, int64 [rows, count], and their probabilities, float32 [rows, count].
    `draw` yields the first of them; for NO_NOISE the order is that of p. Behind a row's last possible token the probability is 0.

    seeds: None where no row has noise, which saves the hash.
    """
    if probabilities.device.type == "cpu":
        seeds = torch.full_like(positions, NO_NOISE) if seeds is None else seeds
        return _best_on_host(probabilities.float(), seeds, positions, count)
    scores = probabilities if seeds is None else _scores(probabilities, seeds, positions)
    tokens = scores.topk(count, dim=-1).indices
    return tokens, probabilities.float().gather(1, tokens)


def _scores(probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """p / E, float32 [rows, vocab]."""
    vocab = probabilities.shape[1]
    parts = zip(*(x.split(_ROWS_AT_ONCE) for x in (probabilities, seeds, positions)), strict=True)
    return torch.cat([p.float() / exponentials(s, i, vocab) for p, s, i in parts])


def exponentials(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """E, float32 [rows, vocab]; 1 in rows of NO_NOISE."""
    # Exact in float32 but for the rounding of the 32 bits: the same on every device.
    uniform = (random_bits(seeds, positions, vocab).float() * 2.0**-32 + 2.0**-33).clamp_(max=_BELOW_ONE)
    return torch.where(seeds.view(-1, 1) < 0, 1.0, uniform.neg_().log1p_().neg_())


# The hash. A row's key is an output of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the seed's stream, number `position`. A
# token's bits are MurmurHash3's 32-bit finalizer over its id, twice, with one half of the key before each.

_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FINAL_1, _FINAL_2 = 0x85EBCA6B, 0xC2B2AE35


def random_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """32 bits a token, int64 [rows, vocab]."""
    keys = row_keys(seeds, positions).view(-1, 1)
    bits = torch.arange(vocab, device=seeds.device) ^ (keys & _LOW)
    return _finalize(_finalize(bits).bitwise_xor_(_shifted(keys, 32)))


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """64 bits a row, as int64 [rows]."""
    state = seeds + (positions + 1) * _signed(_GAMMA)
    state = (state ^ _shifted(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shifted(state, 27)) * _signed(_MIX_2)
    return state ^ _shifted(state, 31)


def _finalize(bits: torch.Tensor) -> torch.Tensor:
    """Mixes bits in place; they are below 2**32. A product's low 32 bits are right although the whole overflows."""
    bits ^= bits >> 16
    bits.mul_(_FINAL_1).bitwise_and_(_LOW)
    bits ^= bits >> 13
    bits.mul_(_FINAL_2).bitwise_and_(_LOW)
    bits ^= bits >> 16
    return bits


def _shifted(words: torch.Tensor, places: int) -> torch.Tensor:
    """To the right, as unsigned 64-bit words."""
    return (words >> places) & ((1 << 64 - places) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# On a CPU: one pass over a row, which takes a logarithm only where the token may be among the best.


def _best_on_host(
    probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = np.zeros((len(probabilities), count), np.int64)
    found = np.zeros((len(probabilities), count), np.float32)
    keys = row_keys(seeds, positions).numpy()
    _best_of_rows(probabilities.contiguous().numpy(), keys, (seeds >= 0).numpy(), tokens, found)
    return torch.from_numpy(tokens), torch.from_numpy(found)


@numba.njit
def _finalized(bits):  # pragma: no cover
    bits = np.uint32(bits ^ (bits >> np.uint32(16)))
    bits = np.uint32(bits * np.uint32(_FINAL_1))
    bits = np.uint32(bits ^ (bits >> np.uint32(13)))
    bits = np.uint32(bits * np.uint32(_FINAL_2))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@numba.njit
def _bits(low, high, token):  # pragma: no cover
    """The bits of one token.

    low, high: halves of the row's key, uint32.
    """
    return _finalized(np.uint32(_finalized(np.uint32(np.uint32(token) ^ low)) ^ high))


@numba.njit
def _uniform(low, high, token):  # pragma: no cover
    bits = _bits(low, high, token)
    return min(np.float32(bits) * np.float32(2.0**-32) + np.float32(2.0**-33), np.float32(_BELOW_ONE))


@numba.njit
def _insert(tokens, scores, token, score):  # pragma: no cover
    """Keeps both in the order of falling scores; the last one falls out."""
    place = len(scores) - 1
    while place > 0 and scores[place - 1] < score:
        scores[place], tokens[place] = scores[place - 1], tokens[place - 1]
        place -= 1
    scores[place], tokens[place] = score, token


@numba.njit(cache=True, nogil=True)
def _best_of_rows(probabilities, keys, noisy, tokens, found):  # pragma: no cover
    """Fills tokens and found, [rows, count], from zeros. keys: int64 [rows]. noisy: bool [rows]."""
    rows, vocab = probabilities.shape
    scores = np.empty(tokens.shape[1], np.float32)
    for row in range(rows):
        of_row = probabilities[row]
        low, high = np.uint32(keys[row] & _LOW), np.uint32((keys[row] >> 32) & _LOW)
        scores[:] = 0
        for begin in range(0, vocab, _BLOCK):
            end = min(begin + _BLOCK, vocab)
            worst = scores[-1]
            candidates = 0
            # E is at least u, so p / E is at most p / u.
            if noisy[row]:
                for token in range(begin, end):
                    candidates += of_row[token] > worst * _uniform(low, high, token)
            else:
                for token in range(begin, end):
                    candidates += of_row[token] > worst
            if candidates == 0:
                continue
            for token in range(begin, end):
                score = of_row[token]
                if noisy[row] and score > 0:
                    uniform = _uniform(low, high, token)
                    if score > scores[-1] * uniform:
                        score = score / -np.log1p(-uniform)
                if score > scores[-1]:
                    _insert(tokens[row], scores, token, score)
        for place in range(len(scores)):
            if scores[place] > 0:
                found[row, place] = of_row[tokens[row, place]]
