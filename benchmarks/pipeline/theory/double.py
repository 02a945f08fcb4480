"""Equations of DOUBLE (Shen et al.), as printed. Where they do not hold, `parallel` has what does.

acceptance: alpha, below 1. gamma: forwards of the draft model in a round, each of which gives one token. ratio: C, seconds of a
target's forward over those of a draft's. A cycle: k - 1 rounds whose drafted tokens are all accepted, then one with a refusal.
"""

from __future__ import annotations

from benchmarks.pipeline.theory.chain import chain_tokens


def rounds(acceptance: float, gamma: int) -> float:
    """Equation 8: k, the rounds of a cycle."""
    return 1 / (1 - acceptance**gamma)


def sequential_tokens(acceptance: float, gamma: int) -> float:
    """Theorem 2, equations 3, 9 and 10: E[L_k], tokens of a cycle of drafting, then verifying."""
    return (rounds(acceptance, gamma) - 1) * (gamma + 1) + chain_tokens(acceptance, gamma)


def parallel_tokens(acceptance: float, gamma: int) -> float:
    """Equation 12: E[L_p], tokens of a cycle of drafting beside the target, which has no extra token after a full round."""
    return sequential_tokens(acceptance, gamma) - (rounds(acceptance, gamma) - 1)


def sequential_speedup(acceptance: float, gamma: int, ratio: float) -> float:
    """Equation 11: S_SD over plain decoding."""
    return sequential_tokens(acceptance, gamma) * ratio / (rounds(acceptance, gamma) * (gamma + ratio))


def parallel_speedup(acceptance: float, gamma: int, ratio: float) -> float:
    """Equation 13: S_PSD over plain decoding. gamma: at least C, so that a round takes as long as its drafting."""
    return parallel_tokens(acceptance, gamma) * ratio / (rounds(acceptance, gamma) * gamma + ratio)


def parallel_bound(acceptance: float, gamma: int, ratio: float) -> float:
    """The middle bound of theorem 3, equations 4 and 17: S_PSD if a cycle had gamma tokens a round and no more."""
    drafted = rounds(acceptance, gamma) * gamma
    return drafted * ratio / (drafted + ratio)


def double_speedup(tokens: float, bonus: float, drafted: float, ratio: float, matched: float) -> float:
    """Equation 7: S_DOUBLE over plain decoding.

    tokens, bonus: E[L_d] and E[L_bonus] of a cycle. drafted: k gamma. matched: AMT, retrieved tokens of a forward. The paper says
    neither what E[L_d] is nor whether gamma counts forwards or tokens.
    """
    scaled = ratio * (1 + matched)
    return (tokens + bonus) * scaled / (drafted + scaled)
