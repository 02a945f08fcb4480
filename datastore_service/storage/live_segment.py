"""A segment of a live tier: its segment file, and beside it a file that says whose its documents are.

docs/storage-format.md describes the second file's bytes.
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from datastore_service.engine.provenance import PROVENANCE, UNNUMBERED, provenance_of, unnumbered
from datastore_service.engine.segment import Segment
from datastore_service.protocol.types import Opening
from datastore_service.storage.encrypted_file import read_whole, writing
from datastore_service.storage.encryption_keys import UNENCRYPTED, TextKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.live_manifest import LiveManifest
from datastore_service.storage.segment_file import DAMAGED, SegmentFile, open_verified, write_segment

MAGIC = b"SPECPROV"
VERSION = 2
_UNNUMBERED_VERSION = 1  # does not say where they were published
SUFFIX = ".prov"
_HEADER = struct.Struct("<8sII")  # magic, version, CRC-32 of all that follows
_COUNT = struct.Struct("<Q")
_UNNAMED_FORMAT = 1  # of a manifest whose segments have no such files


def write_live_segment(path: Path, segment: Segment, tokenizer: str, keys: TextKeys = UNENCRYPTED) -> Segment:
    """Writes both files, each atomically and durably; returns the segment as it is mapped. Raises as `write_segment`."""
    write_provenance(path, segment.provenance, keys)
    write_segment(path, segment, tokenizer, keys)
    return replace(SegmentFile(path, tokenizer, keys).segment, provenance=segment.provenance)


def open_live_segment(
    path: Path, manifest: LiveManifest, keys: TextKeys = UNENCRYPTED, verify: bool = True
) -> Segment:
    """A segment of a folder with that manifest. Raises StorageError for a damaged file and for another tokenizer or vocabulary.

    verify: reads all of the segment file."""
    if verify:
        segment = open_verified(path, manifest.tokenizer, manifest.vocab_size, keys).segment
    else:
        segment = SegmentFile(path, manifest.tokenizer, keys).segment
    return replace(segment, provenance=_read(path, segment.documents, manifest, keys))


def link_live_segment(source: Path, target: Path, manifest: LiveManifest, keys: TextKeys) -> None:
    """Gives both files a second name. manifest: of the source's folder."""
    if manifest.format == _UNNAMED_FORMAT:
        write_provenance(target, open_live_segment(source, manifest, keys, verify=False).provenance, keys)
    else:
        os.link(provenance_path(source), provenance_path(target))
    os.link(source, target)


def remove_live_segment(path: Path) -> None:
    """Removes what there is of both files."""
    path.unlink(missing_ok=True)
    provenance_path(path).unlink(missing_ok=True)


def provenance_path(segment: Path) -> Path:
    return segment.with_suffix(SUFFIX)


def write_provenance(segment: Path, provenance: np.ndarray, keys: TextKeys = UNENCRYPTED) -> None:
    """Writes the file beside a segment file. provenance: PROVENANCE [documents]."""
    content = _COUNT.pack(len(provenance)) + provenance.tobytes()
    with writing(provenance_path(segment), keys, _HEADER.size + len(content)) as file:
        file.write(_HEADER.pack(MAGIC, VERSION, crc32(content)) + content)


def read_provenance(path: Path, keys: TextKeys = UNENCRYPTED) -> np.ndarray:
    """The contents of such a file, PROVENANCE [documents]. Raises StorageError."""
    return parse_provenance(path, read_whole(path, keys))


def parse_provenance(path: Path, data: bytes) -> np.ndarray:
    """The same of a file's bytes. path: what the errors name."""
    if len(data) < _HEADER.size + _COUNT.size:
        raise StorageError(path, "length", f"{len(data)} bytes, shorter than the header")
    magic, version, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise StorageError(path, "magic", f"{magic!r}, this does not say whose a segment is")
    if version not in (_UNNUMBERED_VERSION, VERSION):
        raise StorageError(path, "version", f"{version}, this program reads 1 to {VERSION}")
    content = data[_HEADER.size :]
    (count,) = _COUNT.unpack_from(content)
    kind = PROVENANCE if version == VERSION else UNNUMBERED
    if checksum != crc32(content) or len(content) != _COUNT.size + count * kind.itemsize:
        raise StorageError(path, "checksum", DAMAGED.removeprefix("checksum "))
    rows = content[_COUNT.size :]
    return np.frombuffer(rows, PROVENANCE) if version == VERSION else unnumbered(rows)


def _read(path: Path, documents: int, manifest: LiveManifest, keys: TextKeys) -> np.ndarray:
    """The provenance of a segment. A segment without such a file is nobody's, and as old as itself."""
    if manifest.format == _UNNAMED_FORMAT:
        return provenance_of(Opening(), path.stat().st_mtime, documents)
    provenance = read_provenance(provenance_path(path), keys)
    if len(provenance) != documents:
        raise StorageError(
            provenance_path(path), "documents", f"{len(provenance)}, the segment has {documents}"
        )
    return provenance
