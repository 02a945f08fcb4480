"""Damage as a disk does it: bytes of a file change, its length does not, and who has mapped it sees the change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@contextmanager
def flipped(path: Path, at: int, bits: int) -> Iterator[None]:
    """One byte differs in `bits` for as long."""
    before = path.read_bytes()[at]
    overwrite(path, at, bytes([before ^ bits]))
    yield
    overwrite(path, at, bytes([before]))
