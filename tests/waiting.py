"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str = "", seconds: float = 10.0) -> None:
    """Returns once it is true; fails if it is not in time. what: said of the failure."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.05)
