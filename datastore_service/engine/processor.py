"""The x86-64 level that kernels are compiled for where NUMBA_CPU_NAME names one, as in the images."""

from __future__ import annotations

import llvmlite.binding as llvm
from numba.core import config

# What each level adds to the one before, by LLVM's names (x86-64 psABI, "Micro-architecture levels").
LEVELS = {
    "x86-64": ("cx8", "cmov", "fxsr", "mmx", "sse", "sse2"),
    "x86-64-v2": ("cx16", "sahf", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}


def check_processor() -> None:
    """Raises ValueError if the kernels are for a level that this processor lacks: the first one would end the process."""
    level = config.CPU_NAME
    missing = [feature for feature in features(level) if not llvm.get_host_cpu_features()[feature]]
    if missing:
        raise ValueError(
            f"NUMBA_CPU_NAME: the kernels are for {level}, and this processor has no {', '.join(missing)}"
            " (docs/operations.md, Containers: how to build for another level)"
        )


def features(level: str | None) -> list[str]:
    """The features of a level and of those below it. There are none for other processors' names and where no name is given, because
    then the kernels are for this processor."""
    if level not in LEVELS:
        return []
    names = list(LEVELS)
    return [feature for name in names[: names.index(level) + 1] for feature in LEVELS[name]]
