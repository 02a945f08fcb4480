"""What a command needs of the system beside the packages of the environment, by the Debian package that has it."""

from __future__ import annotations

import ctypes
import shutil

# By what is asked for: a shared library is loaded, a program looked up.
PACKAGES = {
    "chromium": "chromium",
    "g++": "g++",
    "libcurl4": "libcurl.so.4",
    "libibverbs1": "libibverbs.so.1",
    "libnuma1": "libnuma.so.1",
    "prometheus": "promtool",
}
# Mooncake is linked with them. It moves the KV cache between the instances of a split.
SPLIT = ("libcurl4", "libibverbs1", "libnuma1")


def lacking(*packages: str) -> str:
    """One line that tells what this machine lacks of them and what to type; empty if it has them all."""
    absent = [package for package in packages if not _has(PACKAGES[package])]
    return f"this machine lacks {', '.join(absent)}: apt-get install {' '.join(absent)}" if absent else ""


def _has(name: str) -> bool:
    if ".so" not in name:
        return shutil.which(name) is not None
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
