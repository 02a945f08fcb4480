"""The manifest of a stored live tier: which namespace it belongs to, and which files of its folder are valid.

It is replaced atomically. docs/storage-format.md describes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from datastore_service.protocol.types import Namespace
from datastore_service.storage.checksummed_json import read_object, verified_fields, write_checksummed
from datastore_service.storage.errors import StorageError

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class LiveManifest:
    """segments: file names, oldest first. first_log: logs with a lower number are not valid."""

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
    fields = read_object(path)
    if fields["format"] != FORMAT:
        raise StorageError(
            path,
            "format",
            f"{fields['format']}, but there is only format {FORMAT} yet: start the specstore that wrote it",
        )
    fields = verified_fields(path, fields)
    del fields["format"]
    return LiveManifest(**fields | {"segments": tuple(fields["segments"])})


def write_live_manifest(folder: Path, manifest: LiveManifest) -> None:
    """Replaces the manifest atomically and durably."""
    write_checksummed(folder / MANIFEST, {"format": FORMAT, **asdict(manifest)})
