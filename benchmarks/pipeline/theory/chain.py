"""A chain of drafted tokens that the target verifies in one step."""

from __future__ import annotations

import numpy as np


def chain_tokens(acceptance: float, length: int) -> float:
    """Tokens of a step whose drafted tokens are each accepted with this probability, the target's own token included."""
    return float(np.sum(acceptance ** np.arange(length + 1)))
