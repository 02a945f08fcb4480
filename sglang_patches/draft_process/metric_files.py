"""The metrics files of a process that begins while others are scraped.

prometheus_client makes such a file first and then gives it its size. A scrape in between fails, for the metrics of all processes. A process that
is killed in between leaves an empty file, and every later scrape fails (prometheus/client_python#1199).
"""

from __future__ import annotations

import os

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

SIZE = 1 << 16  # a file of zeros has no values


class WholeFile(MmapedDict):
    """A file that has its size before anybody sees it."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        if not read_mode and not os.path.exists(filename):
            unseen = f"{filename}.new"  # a scrape reads *.db
            with open(unseen, "wb") as file:
                file.truncate(SIZE)
            os.rename(unseen, filename)
        super().__init__(filename, read_mode)


def make_them_whole() -> None:
    """Has this process make its metrics files so from now on: before its first metric."""
    setattr(values, "MmapedDict", WholeFile)  # noqa: B010 - mypy forbids to assign to a type
