"""Compiled entry points of the engine, and where their machine code is kept between processes.

Numba caches a compiled function with everything it calls inlined or linked, but tells whether the cache is stale from
the file of the function alone: after an edit of another module, or an upgrade in place, it would go on running old
code. Its cache files are named after the qualified name of the function, so a digest of all sources in that name keeps
versions apart. The files are beside the sources, or where that is not writable in a directory of the user's
(NUMBA_CACHE_DIR, else ~/.cache/numba).

Concurrent processes. Numba replaces cache files atomically, but two processes that add *different* signatures of one
function to its index at the same time can leave the index naming the wrong file. So an entry point has one signature
(arrays whose type varies are passed by address), and what only other kernels call is not cached by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit

from datastore_service.engine import SOURCES

log = logging.getLogger(__name__)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point, which releases the GIL; cached for exactly this version of the engine's sources."""
    function.__qualname__ += f"_{SOURCES}"
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory is writable
        _report_uncached()
        return njit(nogil=True)(function)


@cache
def _report_uncached() -> None:
    log.warning("no directory for compiled kernels, so each start compiles them: set NUMBA_CACHE_DIR")
