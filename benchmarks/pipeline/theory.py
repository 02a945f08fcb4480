"""Formulas of Speculative Speculative Decoding (Kumar et al.) that explain what the simulation shows.

T: seconds over those of the target's step. E: tokens of a step. p: probability of a hit. The theorems are the paper's.
"""

from __future__ import annotations

import math

import numpy as np


def chain_tokens(acceptance: float, length: int) -> float:
    """Tokens of a step whose drafted tokens are each accepted with this probability, the target's own token included."""
    return float(np.sum(acceptance ** np.arange(length + 1)))


def synchronous(tokens: float, t_draft: float) -> float:
    """Speed-up over plain decoding of drafting, then verifying."""
    return tokens / (1 + t_draft)


def hit_rate(after_hit: float, after_miss: float) -> float:
    """Equation 1: of all steps, from the rates after a step of either kind."""
    return after_miss / (1 + after_miss - after_hit)


def speedup(
    p_hit: float, e_hit: float, e_miss: float, t_primary: float, t_backup: float, batch: int = 1
) -> float:
    """Theorem 7; Corollary 16 for a batch, all of which waits for the backup if any request of it is missed."""
    tokens, all_hit = p_hit * e_hit + (1 - p_hit) * e_miss, p_hit**batch
    return tokens / (all_hit * max(1.0, t_primary) + (1 - all_hit) * (1 + t_backup))


def sandwich(p_hit: float, e_hit: float, e_sync: float, t_sync: float) -> tuple[float, float]:
    """Corollary 9: bounds of the speed-up over synchronous decoding if drafts are in time and the backup takes none."""
    most = (1 + t_sync) * e_hit / e_sync
    return most * p_hit, most


def critical_batch(p_hit: float, e_hit: float, e_miss: float, t_primary: float) -> float:
    """Theorem 17: b*, below which waiting after a miss is better than a backup without latency. Infinite where it always is, 0 where
    it never is."""
    mean = p_hit * e_hit + (1 - p_hit) * e_miss
    left = 1 + (1 - e_hit / mean) / t_primary
    if left <= 0:
        return math.inf
    return max(0.0, math.log(left) / math.log(p_hit))


def saguaro_sampling(drafted: np.ndarray, fan_out: int, weight: float) -> np.ndarray:
    """Definition 14: the likeliest `fan_out` tokens are drawn less often by the factor `weight` (C)."""
    scaled = drafted.copy()
    scaled[np.argsort(-drafted, kind="stable")[:fan_out]] *= weight
    return scaled / scaled.sum()


def acceptance_rate(target: np.ndarray, drafted: np.ndarray) -> float:
    """Theorem 1."""
    return float(np.minimum(target, drafted).sum())


def hits_after_refusal(target: np.ndarray, drafted: np.ndarray, guessed: np.ndarray, fan_out: int) -> float:
    """Theorem 19: how often the token that replaces a refused one is among the likeliest `fan_out` others of `guessed`."""
    refused = np.maximum(drafted - target, 0)
    residual = np.maximum(target - drafted, 0)
    order = np.argsort(-guessed, kind="stable")
    found = [residual[order[order != token][:fan_out]].sum() for token in range(len(target))]
    return float(refused @ found / refused.sum() / residual.sum())
