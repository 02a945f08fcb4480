"""The manifest of a stored live tier: which namespace it belongs to, and which files of its folder are valid.

It is replaced atomically. docs/storage-format.md describes it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from datastore_service.protocol.types import Namespace
from datastore_service.storage.checksummed_json import (
    read_object,
    segment_names,
    typed_fields,
    verified_fields,
    write_checksummed,
)
from datastore_service.storage.errors import StorageError
from datastore_service.storage.segment_file import SUFFIX

MANIFEST = "manifest.json"
FORMAT = 1
_KINDS = {
    "model": str, "tokenizer": str, "tenant": str, "vocab_size": int, "segments": list, "first_log": int,
}  # fmt: skip
_SEGMENT = re.compile(r"[0-9]{1,18}" + re.escape(SUFFIX))  # its number is read from its name


@dataclass(frozen=True, slots=True)
class LiveManifest:
    """What a live tier's manifest says: the namespace, its vocabulary, and which segments and logs are valid.

    segments: file names, oldest first.
    first_log: logs with a lower number are not valid."""

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
    fields = typed_fields(path, verified_fields(path, fields), _KINDS)
    return LiveManifest(**fields | {"segments": segment_names(path, fields["segments"], _SEGMENT)})


def write_live_manifest(folder: Path, manifest: LiveManifest) -> None:
    """Replaces the manifest atomically and durably."""
    write_checksummed(folder / MANIFEST, {"format": FORMAT, **asdict(manifest)})
