"""JSON objects with a checksum of their fields, replaced atomically. Manifests are stored so."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from datastore_service.storage.atomic import atomic_write
from datastore_service.storage.errors import StorageError


def write_checksummed(path: Path, fields: dict) -> None:
    """Writes the fields and a field `checksum`, atomically and durably."""
    with atomic_write(path) as file:
        file.write(checksummed(fields))


def checksummed(fields: dict) -> bytes:
    """The fields and a field `checksum` as JSON."""
    return (json.dumps(fields | {"checksum": _checksum(fields)}, indent=2) + "\n").encode()


def read_object(path: Path) -> dict:
    """The fields of the file, not verified. Raises StorageError unless it is a JSON object with a number `format`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error
    return parse_object(path, data)


def parse_object(path: Path | str, data: bytes) -> dict:
    """The same of a file's bytes. path: what the errors name."""
    try:
        fields = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise StorageError(path, "file", f"not JSON, the file is damaged: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise StorageError(path, "format", "missing, the file is damaged")
    return fields


def verified_fields(path: Path | str, fields: dict) -> dict:
    """The fields without their checksum. Raises StorageError if the checksum is missing or does not match."""
    fields = dict(fields)
    if fields.pop("checksum", None) != _checksum(fields):
        raise StorageError(path, "checksum", "does not match, the file is damaged")
    return fields


def typed_fields(path: Path | str, fields: dict, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The named fields alone. Raises StorageError for one that is missing, of another type, or a number below 0."""
    for name, kind in kinds.items():
        if type(fields.get(name)) is not kind:  # true is no number
            raise StorageError(path, name, f"missing or not {kind.__name__}")
        if kind is int and fields[name] < 0:
            raise StorageError(path, name, f"{fields[name]} is below 0")
    return {name: fields[name] for name in kinds}


def segment_names(path: Path, names: list, pattern: re.Pattern[str]) -> tuple[str, ...]:
    """The field `segments`. Raises StorageError unless each is the name of a file in the manifest's own folder, once."""
    if not all(isinstance(name, str) and pattern.fullmatch(name) for name in names) or len(set(names)) < len(
        names
    ):
        raise StorageError(path, "segments", "not a list of names of segment files in this directory")
    return tuple(names)


def _checksum(fields: dict) -> int:
    """CRC-32 of the fields as JSON without spaces, sorted by name."""
    return crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
