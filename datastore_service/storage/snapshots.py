"""Snapshots of a live tier: folders with a manifest and segments, hard links where the live tier has the same."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from datastore_service.engine.provenance import Selection
from datastore_service.engine.segment import part_of
from datastore_service.storage.atomic import TEMPORARY, remove_tree, sync_directory
from datastore_service.storage.encryption_keys import UNENCRYPTED, TextKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.live_manifest import (
    FORMAT,
    MANIFEST,
    LiveManifest,
    read_live_manifest,
    segment_number,
    write_live_manifest,
)
from datastore_service.storage.live_segment import SUFFIX as PROVENANCE_SUFFIX
from datastore_service.storage.live_segment import (
    open_live_segment,
    provenance_path,
    write_live_segment,
)
from datastore_service.storage.segment_file import SUFFIX, SegmentFile

log = logging.getLogger(__name__)

_SNAPSHOT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot of a namespace. The sizes of a damaged one are 0.

    nbytes: bytes of its files.
    created: seconds since 1970.
    damage: why it cannot be restored, "" if nothing is known against it."""

    name: str
    tokens: int
    nbytes: int
    created: float
    damage: str = ""


def snapshot_path(folder: Path, name: str) -> Path:
    """The folder of a snapshot. Raises ValueError for a name that could lead to another place on the disk."""
    if not _SNAPSHOT_NAME.fullmatch(name) or name.endswith(TEMPORARY):
        raise ValueError(
            f"name: {name[:64]!r} is not 1 to 100 letters, digits, dots, dashes and underscores that begin with a letter "
            f"or digit and do not end in {TEMPORARY}"
        )
    return folder / name


def list_snapshots(folder: Path, keys: TextKeys = UNENCRYPTED) -> list[SnapshotInfo]:
    """The snapshots of one namespace, oldest first."""
    found = (_snapshot_info(path, keys) for path in snapshot_folders(folder))
    return sorted(found, key=lambda snapshot: snapshot.created)


def snapshot_folders(folder: Path) -> list[Path]:
    """The folders of one namespace's snapshots."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir() and path.suffix != TEMPORARY]


def thin_snapshot(folder: Path, leaving: Selection, keys: TextKeys = UNENCRYPTED) -> list[np.ndarray]:
    """Takes documents out of a snapshot; returns them. A kill leaves the snapshot as it was or as it shall be, and files that a
    repeated call removes. Raises StorageError for a snapshot that is damaged."""
    manifest = read_live_manifest(folder)
    numbers = itertools.count(max(map(segment_number, manifest.segments), default=0) + 1)
    removed: list[np.ndarray] = []
    names = []
    for name in manifest.segments:
        gone = leaving(open_live_segment(folder / name, manifest, keys, verify=False).provenance)
        if not gone.any():
            names.append(name)
            continue
        segment = open_live_segment(folder / name, manifest, keys)  # what is damaged would pass for intact
        removed += segment.chosen(gone)
        if not gone.all():
            names.append(f"{next(numbers):08d}{SUFFIX}")
            write_live_segment(folder / names[-1], part_of(segment, ~gone), manifest.tokenizer, keys)
    if removed:
        thinned = replace(manifest, segments=tuple(names), created=_created(folder, manifest), format=FORMAT)
        write_live_manifest(folder, thinned)
    _remove_unlisted(folder, names)
    return removed


def remove_old_snapshots(folder: Path, before: float) -> list[str]:
    """Removes one namespace's snapshots that were made before a time, in seconds since 1970; returns their names."""
    old = [path for path in snapshot_folders(folder) if _made(path) < before]
    for path in old:
        path.rename(
            path.with_name(f".{path.name}{TEMPORARY}")
        )  # no snapshot that is being made has such a name
        sync_directory(folder)
    for path in folder.glob(f".*{TEMPORARY}"):
        remove_tree(path)
    return [path.name for path in old]


def _remove_unlisted(folder: Path, names: list[str]) -> None:
    listed = {path.name for name in names for path in (folder / name, provenance_path(folder / name))}
    for path in list(folder.iterdir()):
        if path.suffix in (SUFFIX, PROVENANCE_SUFFIX, TEMPORARY) and path.name not in listed:
            path.unlink()
    sync_directory(folder)


def _made(folder: Path) -> float:
    try:
        return _created(folder, read_live_manifest(folder))
    except StorageError:
        return folder.stat().st_mtime


def _created(folder: Path, manifest: LiveManifest) -> float:
    return manifest.created or (folder / MANIFEST).stat().st_mtime


def _snapshot_info(folder: Path, keys: TextKeys) -> SnapshotInfo:
    try:
        return _intact_info(folder, keys)
    except StorageError as error:
        log.warning("damaged snapshot: %s", error)
        damage = f"{error.path.name}: {error.field}: {error.reason}"
        return SnapshotInfo(folder.name, 0, 0, folder.stat().st_mtime, damage)


def _intact_info(folder: Path, keys: TextKeys) -> SnapshotInfo:
    manifest = read_live_manifest(folder)
    files = [SegmentFile(folder / name, manifest.tokenizer, keys) for name in manifest.segments]
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    tokens = sum(map(len, files))
    return SnapshotInfo(folder.name, tokens, nbytes, _created(folder, manifest))
