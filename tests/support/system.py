"""What a test needs of the system: `sglang_patches.launch.system` knows how to ask for it."""

import pytest

from sglang_patches.launch.system import lacking


def require(*packages: str) -> None:
    """Skips the test that needs these Debian packages where one is missing; in CI that is a failure (tests/skips.py)."""
    if line := lacking(*packages):
        pytest.skip(line)
