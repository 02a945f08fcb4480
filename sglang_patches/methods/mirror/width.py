"""How many choices of a row cross to the draft process (appendix D.1)."""

from __future__ import annotations

MOST = 8  # kappa of a small batch
_BY_BATCH = ((8, MOST), (16, 4), (32, 2))


def choices_of(batch: int) -> int:
    """kappa, of a batch of so many requests: 8 up to 8, 4 up to 16, 2 up to 32, 1 above."""
    return next((choices for most, choices in _BY_BATCH if batch <= most), 1)
