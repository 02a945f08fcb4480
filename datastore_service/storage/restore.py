"""Makes a data directory of a backup: what `specstore restore-backup` does.

Files are fetched into a folder inside the directory and checked there. While that folder exists no service opens the directory, so a
kill leaves either nothing that a service would take for text, or all of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from datastore_service.protocol.types import MAX_VOCAB
from datastore_service.storage.atomic import atomic_write, remove_tree, sync_directory
from datastore_service.storage.backup import Backup, StoredFile
from datastore_service.storage.backup_store import CHUNK, OBJECTS, BackupStore
from datastore_service.storage.data_directory import LIVE, PRIOR, RESTORING, SNAPSHOTS, DataDirectory
from datastore_service.storage.directory_file import DIRECTORY, write_name
from datastore_service.storage.directory_lock import LOCK, DirectoryLock
from datastore_service.storage.encryption_keys import NO_KEYS, OperatorKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.live_manifest import MANIFEST, read_live_manifest
from datastore_service.storage.live_segment import open_live_segment
from datastore_service.storage.manifest import has_manifest, open_segments
from datastore_service.storage.quota_file import QUOTAS
from datastore_service.storage.snapshots import snapshot_folders

_PARTS = (PRIOR, SNAPSHOTS, QUOTAS, DIRECTORY, LIVE)
_FOREIGN = {LOCK, "lost+found"}  # an empty volume may have them


def restore(
    store: BackupStore,
    backup: Backup,
    directory: Path,
    progress: Callable[[StoredFile], None] = lambda _: None,
    keys: OperatorKeys = NO_KEYS,
) -> int:
    """Fetches a backup into a directory that is empty or not there, or in which a restore was interrupted. Each file is compared with
    its SHA-256, and read as the start of a service reads it. Returns the vocabulary's size, which a service must be started with.

    progress is called with each file before it is fetched. keys: with which a service will open the directory. Raises StorageError, also
    naming a key that is missing, OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    sync_directory(directory.parent)
    with DirectoryLock(directory):
        _make_empty(directory)
        staged = directory / RESTORING
        staged.mkdir()
        sync_directory(directory)
        _fetch(store, backup, staged, progress)
        if backup.directory:
            write_name(staged, backup.directory)
        vocab_size = _verify(staged, keys)
        for folder in (staged, *filter(Path.is_dir, staged.rglob("*"))):
            sync_directory(folder)
        for part in (staged / name for name in _PARTS if (staged / name).exists()):
            part.rename(directory / part.name)
        sync_directory(directory)
        remove_tree(staged)
        sync_directory(directory)
    return vocab_size


def _make_empty(directory: Path) -> None:
    """Removes what an interrupted restore has left. Raises StorageError for anything else in the directory."""
    names = {path.name for path in directory.iterdir()} - _FOREIGN
    if RESTORING in names:
        names -= {RESTORING, *_PARTS}
    if names:
        raise StorageError(directory, "directory", f"not empty, it has {min(names)}")
    for name in (*_PARTS, RESTORING):  # the mark of the interrupted one last
        path = directory / name
        path.unlink(missing_ok=True) if path.is_file() else remove_tree(path)


def _fetch(store: BackupStore, backup: Backup, staged: Path, progress: Callable[[StoredFile], None]) -> None:
    """Fetches each content once: what was one file under several names becomes that again."""
    fetched: dict[tuple[str, int], Path] = {}
    for file in backup.files:
        progress(file)
        path, key = staged / file.path, (file.sha256, file.modified)
        path.parent.mkdir(parents=True, exist_ok=True)
        if key in fetched:
            os.link(fetched[key], path)
        else:
            _fetch_file(store, file, path)
            fetched[key] = path


def _fetch_file(store: BackupStore, file: StoredFile, path: Path) -> None:
    name, digest = f"{OBJECTS}/{file.sha256}", hashlib.sha256()
    with store.reading(name) as content, atomic_write(path) as target:
        while part := content.read(CHUNK):
            digest.update(part)
            target.write(part)
        if digest.hexdigest() != file.sha256:
            raise StorageError(store.place(name), "sha256", "does not match, the backup is damaged")
    os.utime(path, ns=(file.modified, file.modified))


def _verify(staged: Path, keys: OperatorKeys) -> int:
    """Reads all as a service does at its start."""
    manifests = sorted((staged / LIVE).glob(f"*/{MANIFEST}"))
    vocab_size = read_live_manifest(manifests[0].parent).vocab_size if manifests else MAX_VOCAB
    data = DataDirectory(staged, vocab_size, keys)
    try:
        for namespace in data.namespaces:
            store = data.open(namespace)
            store.recover()
            store.close()
    finally:
        data.close()
    for snapshot in (path for folder in (staged / SNAPSHOTS).iterdir() for path in snapshot_folders(folder)):
        manifest = read_live_manifest(snapshot)
        for name in manifest.segments:
            open_live_segment(snapshot / name, manifest, keys.of(manifest.namespace))
    if has_manifest(staged / PRIOR):
        open_segments(staged / PRIOR)
    return vocab_size
