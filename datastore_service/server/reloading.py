"""Values made of files that an operator replaces while the service runs: certificates, keys, the table of identities."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
_GONE = b""  # in place of the digest of a file that cannot be read


class Files:
    """Reads files, and says later whether one of them would read differently."""

    def __init__(self) -> None:
        self._read: dict[Path, bytes] = {}  # digests: the text may be secret

    def read(self, path: Path) -> bytes:
        """The file's content. Raises OSError."""
        self._read[path] = _GONE
        data = path.read_bytes()
        self._read[path] = _digest(data)
        return data

    def note(self, path: Path) -> None:
        """Notes a file that is read right after, by something else."""
        self._read[path] = _digest_of(path)

    @property
    def changed(self) -> bool:
        """Whether a file was changed, came or went since it was read."""
        return any(_digest_of(path) != known for path, known in self._read.items())


class Reloading(Generic[T]):
    """A value made of files, and made anew when they change. Where that cannot be done, the earlier value stays in force.

    name: the option that names the files. make: makes the value of what it reads through `Files`; raises ValueError, at the
    construction too.
    value: the one in force. refused: why the value that the files would make is not in force, "" if it is."""

    def __init__(self, name: str, make: Callable[[Files], T]) -> None:
        self.name, self._make, self._files = name, make, Files()
        self.value = make(self._files)
        self.refused = ""

    def refresh(self) -> None:
        """Looks whether the files have changed, and logs what becomes of a change."""
        if not self._files.changed:
            return
        self._files = Files()  # also those of a refused value, so that a mended one is seen
        try:
            self.value = self._make(self._files)
        except ValueError as error:
            self.refused = str(error)
            log.error(
                "changed files are refused, and what they held before stays in force",
                extra={"option": self.name, "reason": self.refused},
            )
        else:
            self.refused = ""
            log.info("changed files are in force", extra={"option": self.name})


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _digest_of(path: Path) -> bytes:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return _GONE
