"""What a command needs of the system beside the packages of the environment, by the Debian package that has it.

`python3 sglang_patches/launch/system.py split` (or `tests`) says what is missing for it, with any Python: before the environment is made,
which takes minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import sys

# By what is asked for: a shared library is loaded, a program looked up.
PACKAGES = {
    "chromium": "chromium",
    "g++": "g++",
    "libcurl4": "libcurl.so.4",
    "libibverbs1": "libibverbs.so.1",
    "libnuma1": "libnuma.so.1",
    "prometheus": "promtool",
    "redis-server": "redis-server",
}
# Mooncake is linked with them. It moves the KV cache between the instances of a split.
SPLIT = ("libcurl4", "libibverbs1", "libnuma1")
USES = {"split": SPLIT, "tests": tuple(PACKAGES)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("use", choices=USES, help="what for")
    use = parser.parse_args().use
    if line := lacking(*USES[use]):
        sys.exit(f"{use}: {line}")


if __name__ == "__main__":
    main()
