"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], bool], what: str | Callable[[], str] = "", seconds: float = 60.0
) -> None:
    """Returns once it is true; fails if it is not in time. what: said of the failure, or what says it then."""
    limit = time.monotonic() + seconds
    while True:
        in_time = time.monotonic() < limit  # before it is looked at: the machine may stand still in between
        if condition():
            return
        assert in_time, what() if callable(what) else what
        time.sleep(0.05)


def mostly(attempt: Callable[[], bool], what: str) -> None:
    """Returns once three attempts have succeeded; fails if fewer of five do. what: said of the failure."""
    succeeded = 0
    for number in range(5):
        succeeded += attempt()
        if succeeded == 3:
            return
        assert succeeded + 4 - number >= 3, f"{what}: {succeeded} of {number + 1} attempts"
