"""Exact means of the process that DOUBLE's appendix B.1 describes, with and without retrieval.

Every drafted token is accepted with the same probability, whatever came before it. In a round the draft model runs `gamma` forwards.
A forward gives 1 + s tokens, of which s were retrieved and found right by the draft model. While the target verifies a round, the
draft model drafts the next. A refusal ends a cycle: what was drafted behind it is lost, and the pipeline starts again.

acceptance: alpha, below 1. gamma: forwards of a round. ratio: C, seconds of a target's forward over those of a draft's.
matched: probabilities that s is 0, 1, 2 and so on; (1,) is without retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.pipeline.theory.chain import chain_tokens

NO_RETRIEVAL = (1.0,)


def matched_tokens(matched: Sequence[float]) -> float:
    """AMT, the mean of s."""
    return float(np.arange(len(matched)) @ np.asarray(matched))


def full_round(acceptance: float, gamma: int, matched: Sequence[float] = NO_RETRIEVAL) -> float:
    """Probability that all tokens of a round are accepted; alpha^(gamma (1 + AMT)) where s is always the same."""
    forward = acceptance ** (1 + np.arange(len(matched))) @ np.asarray(matched)
    return float(forward**gamma)


def rounds(acceptance: float, gamma: int, matched: Sequence[float] = NO_RETRIEVAL) -> float:
    """Of a cycle. Without retrieval it is DOUBLE's equation 8."""
    return 1 / (1 - full_round(acceptance, gamma, matched))


def tokens(acceptance: float) -> float:
    """Of a cycle: those accepted before the refusal and the target's own. They depend neither on gamma nor on retrieval."""
    return 1 / (1 - acceptance)


def tokens_a_round(acceptance: float, gamma: int, matched: Sequence[float] = NO_RETRIEVAL) -> float:
    """1 + alpha + ... + alpha^(gamma (1 + AMT) - 1) where s is always the same."""
    return tokens(acceptance) / rounds(acceptance, gamma, matched)


def sequential_speedup(acceptance: float, gamma: int, ratio: float) -> float:
    """Over plain decoding, of drafting one token a forward, then verifying. It is what DOUBLE's theorem 1 gives a round."""
    return chain_tokens(acceptance, gamma) * ratio / (gamma + ratio)


def speedup(
    acceptance: float,
    gamma: int,
    ratio: float,
    matched: Sequence[float] = NO_RETRIEVAL,
    bonus: float = 0.0,
) -> float:
    """Over plain decoding, of drafting beside the target. bonus: mean tokens that the target retrieved and emits with a refusal."""
    later = (rounds(acceptance, gamma, matched) - 1) * max(gamma, ratio)
    return (tokens(acceptance) + bonus) * ratio / (gamma + later + ratio)


def ceiling(gamma: int, ratio: float, matched: Sequence[float] = NO_RETRIEVAL) -> float:
    """What no acceptance exceeds without a bonus. With gamma of at least C it is C (1 + AMT)."""
    return min(gamma, ratio) * (1 + matched_tokens(matched))


def least_acceptance(gamma: int, ratio: float) -> float:
    """Below it no retrieval by the draft model alone, however long, makes the speed-up exceed C: a cycle has at least one round."""
    return 1 - 1 / (gamma + ratio)
