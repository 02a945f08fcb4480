"""The name of a data directory, in a file that is written once. A directory that was restored from its backup keeps the name."""

from __future__ import annotations

import re
from pathlib import Path

from datastore_service.storage.checksummed_json import (
    read_object,
    typed_fields,
    verified_fields,
    write_checksummed,
)
from datastore_service.storage.errors import StorageError

DIRECTORY = "directory.json"
FORMAT = 1
NAME = re.compile(r"[0-9a-f]{16}")


def read_name(directory: Path) -> str:
    """A data directory's name, "" where it has none yet. Raises StorageError naming the file and the field."""
    path = directory / DIRECTORY
    if not path.exists():
        return ""
    stored = read_object(path)
    if stored["format"] != FORMAT:
        raise StorageError(path, "format", f"{stored['format']}, but there is only format {FORMAT} yet")
    name = typed_fields(path, verified_fields(path, stored), {"name": str})["name"]
    if not NAME.fullmatch(name):
        raise StorageError(path, "name", "not 16 hexadecimal digits")
    return name


def write_name(directory: Path, name: str) -> None:
    """Names a data directory, durably. Raises OSError."""
    write_checksummed(directory / DIRECTORY, {"format": FORMAT, "name": name})
