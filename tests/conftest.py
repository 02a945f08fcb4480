"""What several test packages share."""

from pathlib import Path

import pytest

from sglang_patches.demo import processes

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model, converted on first use (under a minute, kept in the cache directory)."""
    from sglang_patches.demo.model import ensure

    return ensure()


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that stays free until the test binds it."""
    return processes.free_port()


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The workshop's folder beside the checkout; skips where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED.name}/ is not beside the checkout")
    return SHARED
