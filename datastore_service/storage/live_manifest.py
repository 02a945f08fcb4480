"""The manifest of a stored live tier: whose text it is, and which files of its folder count.

It is replaced atomically. docs/storage-format.md describes it.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from datastore_service.engine.types import Namespace
from datastore_service.storage.atomic import replacing
from datastore_service.storage.errors import StorageError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class LiveManifest:
    """segments: file names, oldest first. first_log: logs with a lower number do not count."""

    model: str
    tokenizer: str
    tenant: str
    vocab_size: int
    segments: tuple[str, ...] = ()
    first_log: int = 1

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.model, self.tokenizer, self.tenant)


def read_live_manifest(folder: Path) -> LiveManifest:
    """Raises StorageError naming the manifest and the field."""
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error
    except ValueError as error:
        raise StorageError(path, "file", f"not JSON, the file is damaged: {error}") from error
    return _parse(path, fields)


def write_live_manifest(folder: Path, manifest: LiveManifest) -> None:
    """Replaces the manifest atomically and durably."""
    fields = {"format": FORMAT, **asdict(manifest)}
    text = json.dumps(fields | {"checksum": _checksum(fields)}, indent=2) + "\n"
    with replacing(folder / MANIFEST) as file:
        file.write(text.encode())


def _checksum(fields: dict) -> int:
    """CRC-32 of the fields as JSON without spaces, sorted by name."""
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def _parse(path: Path, fields: object) -> LiveManifest:
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise StorageError(path, "format", "missing, the file is damaged")
    if fields["format"] != FORMAT:
        raise StorageError(
            path,
            "format",
            f"{fields['format']}, but there is only format {FORMAT} yet: start the specstore that wrote it",
        )
    if fields.pop("checksum", None) != _checksum(fields):
        raise StorageError(path, "checksum", "does not match, the file is damaged")
    del fields["format"]
    return LiveManifest(**fields | {"segments": tuple(fields["segments"])})
