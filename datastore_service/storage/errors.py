"""Errors of files."""

from __future__ import annotations

from pathlib import Path

_DIGITS = 24


class StorageError(Exception):
    """A file that cannot be used: one line that names the file and the field at fault."""

    def __init__(self, path: Path | str, field: str, reason: str) -> None:
        super().__init__(f"{path}: {field}: {reason}")
        self.path = Path(path)
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[StorageError], tuple[Path, str, str]]:
        """Errors travel between the processes of a build."""
        return StorageError, (self.path, self.field, self.reason)


def shortened(digits: str) -> str:
    """A number cut to what fits into one line."""
    return digits if len(digits) <= _DIGITS else digits[:_DIGITS] + "..."
