"""`python -m datastore_service.engine.precompile` compiles every kernel, or loads it from Numba's cache, and says how many of which.

An image is built with it, so that none of its containers compiles anything.
"""

from __future__ import annotations

import argparse

import numpy as np
from numba.core import config

from datastore_service.engine.engine import Engine
from datastore_service.engine.kernel import KERNELS
from datastore_service.engine.segment import build_segment
from datastore_service.engine.session import SessionIndex
from datastore_service.engine.tree_check import load

DISTINCT = 300  # tokens: more than a byte can spell


def precompile() -> None:
    """Raises AssertionError naming the kernels that it has not called."""
    tokens = np.arange(DISTINCT, dtype=np.int32)
    build_segment([tokens], DISTINCT).check_integrity()
    SessionIndex().append(tokens)
    Engine(1)
    load()
    missing = [kernel.__name__ for kernel in KERNELS if not kernel.signatures]
    assert not missing, f"not compiled: {', '.join(missing)}"


def compiled() -> int:
    """How many kernels this process has compiled. It has loaded the others."""
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    precompile()
    print(f"{len(KERNELS)} kernels, {compiled()} compiled, for {config.CPU_NAME or 'this processor'}")
