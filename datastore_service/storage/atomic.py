"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp"


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file beside `path`. On success it is synced and renamed to `path`, otherwise removed.

    The directory is synced too, so the new name survives a power failure. A killed process leaves at most a file that
    ends in TEMPORARY: nobody reads it, and the next writer of the same name overwrites it."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a folder and all in it. One that is gone already is no error."""
    if path.exists():
        shutil.rmtree(path)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
