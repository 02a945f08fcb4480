"""The manifest of a stored live tier: which namespace it belongs to, and which files of its folder are valid.

It is replaced atomically. docs/storage-format.md describes it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datastore_service.engine.provenance import Subject
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
FORMAT = 2
_OF_FORMAT_1 = {
    "model": str, "tokenizer": str, "tenant": str, "vocab_size": int, "segments": list, "first_log": int,
}  # fmt: skip
_KINDS = {1: _OF_FORMAT_1, FORMAT: _OF_FORMAT_1 | {"created": float, "forgetting": list}}
_SEGMENT = re.compile(r"[0-9]{1,18}" + re.escape(SUFFIX))  # its number is read from its name


@dataclass(frozen=True, slots=True)
class LiveManifest:
    """What a live tier's manifest says: the namespace, its vocabulary, and which segments and logs are valid.

    segments: file names, oldest first.
    first_log: logs with a lower number are not valid.
    created: of a snapshot, seconds since 1970; else 0.
    forgetting: subjects whose text has yet to leave.
    format: of the file that it was read from. In the first one, segments did not say whose they are."""

    model: str
    tokenizer: str
    tenant: str
    vocab_size: int
    segments: tuple[str, ...] = ()
    first_log: int = 1
    created: float = 0.0
    forgetting: frozenset[Subject] = frozenset()
    format: int = FORMAT

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.model, self.tokenizer, self.tenant)


def read_live_manifest(folder: Path) -> LiveManifest:
    """Raises StorageError naming the manifest and the field."""
    path = folder / MANIFEST
    fields = read_object(path)
    if fields["format"] not in _KINDS:
        raise StorageError(
            path,
            "format",
            f"{fields['format']}, this program reads 1 to {FORMAT}: start the specstore that wrote it",
        )
    typed: dict[str, Any] = typed_fields(path, verified_fields(path, fields), _KINDS[fields["format"]])
    typed["segments"] = segment_names(path, typed["segments"], _SEGMENT)
    typed["forgetting"] = _subjects(path, typed.get("forgetting", []))
    return LiveManifest(**typed, format=fields["format"])


def write_live_manifest(folder: Path, manifest: LiveManifest) -> None:
    """Replaces the manifest atomically and durably."""
    forgetting = sorted(map(str, manifest.forgetting))
    write_checksummed(folder / MANIFEST, asdict(manifest) | {"format": FORMAT, "forgetting": forgetting})


def segment_number(name: str) -> int:
    """The number in the name of a segment file."""
    return int(name.removesuffix(SUFFIX))


def _subjects(path: Path, written: list) -> frozenset[Subject]:
    try:
        return frozenset(map(Subject.parse, written))
    except (ValueError, AttributeError):
        raise StorageError(path, "forgetting", "not a list of subjects") from None
