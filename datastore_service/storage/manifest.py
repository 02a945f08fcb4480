"""A prior on disk: a directory of segment files and the `manifest.json` that lists the valid ones.

A segment file is written first and listed in the manifest afterwards, so an unlisted file is left over from an
interrupted build. The manifest is replaced atomically.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from datastore_service.engine.segment import Segment
from datastore_service.storage.checksummed_json import (
    read_object,
    segment_names,
    typed_fields,
    verified_fields,
    write_checksummed,
)
from datastore_service.storage.errors import StorageError
from datastore_service.storage.segment_file import open_verified

MANIFEST = "manifest.json"
FORMAT = 2
FORMATS_WITHOUT_CHECKSUM = (1,)
_KINDS = {
    "tokenizer": str, "vocab_size": int, "segments": list, "source": str, "part": int, "documents": int,
}  # fmt: skip
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a prior's manifest says: its tokenizer, its segments, and how far an unfinished build has come.

    segments: file names in the order they were built.
    source: digest of the corpus and options of an unfinished build, "" when it is complete.
    part: number of the part of that corpus that the last segment belongs to.
    documents: how many of that part's documents the segments hold already."""

    tokenizer: str
    vocab_size: int
    segments: tuple[str, ...] = ()
    source: str = ""
    part: int = 0
    documents: int = 0


def read_manifest(directory: Path | str) -> Manifest:
    """Raises StorageError naming the manifest and the field."""
    path = Path(directory) / MANIFEST
    return _parse(path, _intact(path, read_object(path)))


def write_manifest(directory: Path | str, manifest: Manifest) -> None:
    """Replaces the manifest atomically and durably."""
    write_checksummed(Path(directory) / MANIFEST, {"format": FORMAT, **asdict(manifest)})


def has_manifest(directory: Path | str) -> bool:
    return (Path(directory) / MANIFEST).is_file()


def has_old_format(directory: Path | str) -> bool:
    """Whether the manifest has a format that is read but no longer written."""
    return read_object(Path(directory) / MANIFEST)["format"] in FORMATS_WITHOUT_CHECKSUM


def open_segments(directory: Path | str, tokenizer: str | None = None) -> list[Segment]:
    """Reads every segment of a directory, compares it with its checksums and maps it. That takes up to a second for each
    GB, and longer for what the disk has to read. tokenizer: the fingerprint they must have, None for the manifest's.

    Raises StorageError for the first file that cannot be used."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    if tokenizer is not None and tokenizer != manifest.tokenizer:
        raise StorageError(
            directory / MANIFEST, "tokenizer", f"built with {manifest.tokenizer}, not {tokenizer}"
        )
    return [
        open_verified(directory / name, manifest.tokenizer, manifest.vocab_size).segment
        for name in manifest.segments
    ]


def _intact(path: Path, fields: dict) -> dict:
    """The fields of a known format, compared with their checksum if the format has one."""
    if fields["format"] in FORMATS_WITHOUT_CHECKSUM:
        if "checksum" in fields:
            raise StorageError(path, "format", f"{fields['format']} has no checksum, the file is damaged")
        return fields
    if fields["format"] != FORMAT:
        raise StorageError(path, "format", f"{fields['format']}, this program reads 1 and {FORMAT}")
    return verified_fields(path, fields)


def _parse(path: Path, fields: dict) -> Manifest:
    fields = typed_fields(path, {"part": 0} | fields, _KINDS)  # manifests of earlier versions lack it
    return Manifest(**fields | {"segments": segment_names(path, fields["segments"], _SEGMENT)})
