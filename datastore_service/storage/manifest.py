"""A prior on disk: a directory of segment files and the `manifest.json` that says which of them count.

A segment file is written first and named in the manifest afterwards, so a file that is not named is a leftover of an
interrupted build. The manifest is replaced atomically.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from datastore_service.engine.segment import Segment
from datastore_service.storage.atomic import replacing
from datastore_service.storage.errors import StorageError
from datastore_service.storage.segment_file import SegmentFile

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """segments: file names in the order they were built. source: digest of the corpus and options of a build in
    progress, "" when it is complete. documents: of that corpus, how many the segments hold already."""

    tokenizer: str
    vocab_size: int
    segments: tuple[str, ...] = ()
    source: str = ""
    documents: int = 0


def read_manifest(directory: Path | str) -> Manifest:
    """Raises StorageError naming the manifest and the field."""
    path = Path(directory) / MANIFEST
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(path, "file", error.strerror or str(error)) from error
    except ValueError as error:
        raise StorageError(path, "file", f"not JSON: {error}") from error
    return _parse(path, fields)


def write_manifest(directory: Path | str, manifest: Manifest) -> None:
    """Replaces the manifest atomically and durably."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2) + "\n"
    with replacing(Path(directory) / MANIFEST) as file:
        file.write(text.encode())


def has_manifest(directory: Path | str) -> bool:
    return (Path(directory) / MANIFEST).is_file()


def open_segments(directory: Path | str, tokenizer: str | None = None, verify: bool = False) -> list[Segment]:
    """Maps every segment of a directory. tokenizer: the fingerprint they must have, None for the manifest's.

    Raises StorageError for the first file that cannot be used; verify reads all of them to be sure."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    if tokenizer is not None and tokenizer != manifest.tokenizer:
        raise StorageError(
            directory / MANIFEST, "tokenizer", f"built with {manifest.tokenizer}, not {tokenizer}"
        )
    files = [SegmentFile(directory / name, manifest.tokenizer) for name in manifest.segments]
    for file in files if verify else ():
        file.verify()
    return [file.segment for file in files]


def _parse(path: Path, fields: object) -> Manifest:
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise StorageError(path, "format", f"not {FORMAT}")
    expected = {"tokenizer": str, "vocab_size": int, "segments": list, "source": str, "documents": int}
    for name, kind in expected.items():
        if not isinstance(fields.get(name), kind):
            raise StorageError(path, name, f"missing or not {kind.__name__}")
    names = fields["segments"]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise StorageError(path, "segments", "not a list of file names in this directory")
    return Manifest(**{name: fields[name] for name in expected} | {"segments": tuple(names)})
