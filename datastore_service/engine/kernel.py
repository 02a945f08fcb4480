"""Compiles the engine's entry points and caches their machine code between processes.

Numba caches a compiled function together with everything that it calls, but decides from the file of the function alone
whether the cache is stale. After an edit of another module, or an upgrade in place, it would keep running old code. Its
cache files are named after the function's qualified name, so a digest of all sources in that name keeps versions apart.
The files are next to the sources, or in a directory of the user's (NUMBA_CACHE_DIR, else ~/.cache/numba) if that is not
writable.

Concurrent processes: Numba replaces cache files atomically. But if two processes add *different* signatures of one
function to its index at the same time, the index can name the wrong file. So an entry point has one signature (arrays
of varying type are passed by address), and a function that only kernels call is not cached by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from numba import njit
from numba.core import event

from datastore_service.engine import SOURCES_DIGEST

log = logging.getLogger(__name__)

KERNELS: list[Any] = []  # all entry points whose modules are imported


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles an entry point, which releases the GIL, and caches it for exactly this version of the engine's sources."""
    function.__qualname__ += f"_{SOURCES_DIGEST}"
    KERNELS.append(_compiled(function))
    return KERNELS[-1]


def _compiled(function: Callable[..., Any]) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no directory is writable
        _report_uncached()
        return njit(nogil=True)(function)


@cache
def _report_uncached() -> None:
    log.warning("no directory for compiled kernels, so each start compiles them: set NUMBA_CACHE_DIR")


@cache
def _report_compilation() -> None:
    log.info("compiling kernels, about 40 s; the next start on this machine finds them compiled")


class _Compilation(event.Listener):
    """Told by Numba when it begins to compile, which it does not for what is in its cache."""

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"] in KERNELS:
            _report_compilation()

    def on_end(self, event: event.Event) -> None:
        pass


event.register("numba:compile", _Compilation())
