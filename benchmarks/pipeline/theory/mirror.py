"""Equations of Mirror-SD, as printed. Where they do not hold, the tests say so.

Times are of one step. prefix, suffix: of the target's layers before and behind the early exit. generation: of the draft's windows.
rendezvous: of what the two tell each other, at the early exit and at the end together.
"""

from __future__ import annotations

import numpy as np


def step_time(prefix: float, suffix: float, generation: float, rendezvous: float = 0.0) -> float:
    """Equations 10 and 14: T_Mirror."""
    return prefix + max(suffix, generation) + rendezvous


def serial_time(prefix: float, suffix: float, generation: float) -> float:
    """Appendix C: T_SD, drafting and then verifying."""
    return prefix + suffix + generation


def saved(suffix: float, generation: float, rendezvous: float = 0.0) -> float:
    """Appendix C: seconds that a step takes less than `serial_time`."""
    return min(suffix, generation) - rendezvous


def draft_steps(window: int, tokens_a_step: float) -> int:
    """Section 3.2: J, internal steps of a draft that streams so many tokens in each (eta)."""
    return int(np.ceil(window / tokens_a_step))


def overlap_mass(target: np.ndarray, exit: np.ndarray, choices: int) -> float:
    """Equation 9: Omega, what the target's distribution has at the early exit's `choices` likeliest tokens."""
    return float(target[np.argsort(-exit, kind="stable")[:choices]].sum())


def allreduce_time(size: float, ranks: int, latency: float, per_word: float) -> float:
    """Appendix C: alpha log G + beta M."""
    return float(latency * np.log2(ranks) + per_word * size)
