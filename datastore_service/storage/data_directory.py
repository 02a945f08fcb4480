"""The data directory of a service: `live/` and `snapshots/`, each with a folder for each namespace, the prior,
`directory.json`, `quotas.json` and `share.json`.

One service at a time writes here: `DirectoryLock` keeps a second one out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from datastore_service.protocol.types import Namespace
from datastore_service.storage.atomic import TEMPORARY, remove_tree, sync_directory
from datastore_service.storage.directory_file import read_name, write_name
from datastore_service.storage.directory_lock import DirectoryLock
from datastore_service.storage.encryption_keys import NO_KEYS, OperatorKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.folder_store import FolderStore, create_folder
from datastore_service.storage.live_manifest import MANIFEST, LiveManifest, read_live_manifest
from datastore_service.storage.quota_file import QUOTAS, Quota, read_quotas, write_quotas
from datastore_service.storage.rewriting import encrypt_folders
from datastore_service.storage.share_file import SHARE, ShareState, read_share, write_share
from datastore_service.storage.snapshots import (
    SnapshotInfo,
    list_snapshots,
    remove_old_snapshots,
    snapshot_folders,
    snapshot_path,
)

log = logging.getLogger(__name__)

LIVE, SNAPSHOTS, PRIOR = "live", "snapshots", "prior"
RESTORING = "restore.tmp"  # is there while a restored directory is not complete
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
NAMESPACE_FOLDER = re.compile(r".*-[0-9a-f]{16}(\.tmp)?")
_READABLE_CHARACTERS = 40  # of a folder's name: the model and the tenant


class DataDirectory:
    """A service's data directory, locked against other processes.

    Opening it takes the lock and removes what interrupted services left in `live/`. Raises StorageError if another
    process writes here or if a file or folder cannot be used, OSError if the disk refuses.

    vocab_size: of every namespace; ids are smaller. keys: encrypt the texts. Opening encrypts what is not, or with an earlier key.
    namespaces: those that were stored here at the start. quotas: by tenant, at the start."""

    def __init__(self, path: Path, vocab_size: int, keys: OperatorKeys = NO_KEYS) -> None:
        self._vocab_size, self._keys = vocab_size, keys
        self._live, self._snapshots, self._quotas = path / LIVE, path / SNAPSHOTS, path / QUOTAS
        self._share = path / SHARE
        self._lock = DirectoryLock(path)
        try:
            self._open_directory(path)
        except BaseException:
            self._lock.close()
            raise

    def _open_directory(self, path: Path) -> None:
        if (path / RESTORING).exists():
            raise StorageError(path / RESTORING, "restore", "not finished: repeat `specstore restore-backup`")
        for folder in (self._live, self._snapshots):
            folder.mkdir(exist_ok=True)
        sync_directory(path)
        sync_directory(self._live)
        if not read_name(path):
            write_name(path, secrets.token_hex(8))
        self.quotas = read_quotas(self._quotas)
        self.namespaces = [store.manifest.namespace for store in self._open_stores()]
        self._encrypt()

    def open(self, namespace: Namespace) -> FolderStore:
        """The namespace's store, created if it is new. Raises ValueError for a tokenizer that is no fingerprint."""
        if not _FINGERPRINT.fullmatch(namespace.tokenizer):
            raise ValueError(
                f"namespace.tokenizer: {namespace.tokenizer!r} is not a fingerprint of 64 hexadecimal digits; "
                "`specstore fingerprint` prints it"
            )
        folder = self._live / folder_name(namespace)
        if not (folder / MANIFEST).exists():
            names = namespace.model, namespace.tokenizer, namespace.tenant
            create_folder(folder, LiveManifest(*names, self._vocab_size))
        return self._open_store(folder)

    def remove(self, namespace: Namespace) -> None:
        """Removes the folder of a namespace whose store is closed. Its snapshots stay. A folder that is gone already is no error."""
        folder = self._live / folder_name(namespace)
        gone = folder.with_name(folder.name + TEMPORARY)
        remove_tree(gone)
        if folder.exists():
            folder.rename(gone)
        sync_directory(self._live)
        remove_tree(gone)

    def snapshots(self, namespace: Namespace) -> list[SnapshotInfo]:
        """The namespace's snapshots, oldest first, even if it was dropped."""
        return list_snapshots(self._snapshots / folder_name(namespace), self._keys.of(namespace))

    def has_snapshot(self, namespace: Namespace, name: str) -> bool:
        """Raises ValueError for a name that no snapshot can have."""
        return snapshot_path(self._snapshots / folder_name(namespace), name).is_dir()

    def keep_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Replaces all quotas, durably. Raises OSError."""
        write_quotas(self._quotas, quotas)

    def share(self) -> ShareState:
        """What the service remembers of streams that it shares; a new service's if it has shared none. Raises StorageError."""
        return read_share(self._share)

    def keep_share(self, state: ShareState) -> None:
        """Replaces it, durably. Raises OSError."""
        write_share(self._share, state)

    def snapshot_namespaces(self, hosted: Iterable[Namespace]) -> tuple[set[Namespace], list[StorageError]]:
        """The hosted namespaces and those that have snapshots, dropped ones too; and the faults of snapshots that cannot be read and lie
        in no known namespace's folder, so that nobody knows whose they are."""
        found: set[Namespace] = set(hosted)
        faults: list[tuple[Path, StorageError]] = []
        for path in self._snapshot_folders():
            try:
                found.add(read_live_manifest(path).namespace)
            except StorageError as error:
                log.error("damaged snapshot: %s", error)
                faults.append((path, error))
        known = {folder_name(namespace) for namespace in found}
        return found, [error for path, error in faults if path.parent.name not in known]

    def remove_old_snapshots(self, before: float) -> None:
        """Removes the snapshots of all namespaces that were made before a time, in seconds since 1970."""
        for folder in filter(Path.is_dir, self._snapshots.iterdir()):
            for name in remove_old_snapshots(folder, before):
                log.info("snapshot removed: it has its greatest age", extra={"snapshot": name})

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()

    def _snapshot_folders(self) -> list[Path]:
        return [path for folder in self._snapshots.iterdir() for path in snapshot_folders(folder)]

    def _encrypt(self) -> None:
        folders = [self._live / folder_name(namespace) for namespace in self.namespaces]
        if files := encrypt_folders(folders, self._snapshot_folders(), self._keys):
            log.info("files encrypted with the first key", extra={"files": files})

    def _open_stores(self) -> list[FolderStore]:
        stores = []
        for folder in sorted(self._live.iterdir()):
            if not NAMESPACE_FOLDER.fullmatch(folder.name):
                log.warning("not a namespace's folder, left alone: %s", folder)
            elif folder.suffix == TEMPORARY or _was_never_used(folder):
                shutil.rmtree(folder)
            else:
                stores.append(self._open_store(folder))
        return stores

    def _open_store(self, folder: Path) -> FolderStore:
        store = FolderStore(folder, self._snapshots / folder.name, self._keys)
        namespace, vocab_size = store.manifest.namespace, store.manifest.vocab_size
        if folder_name(namespace) != folder.name:
            raise StorageError(
                folder / MANIFEST,
                "namespace",
                f"{namespace}, whose folder is {folder_name(namespace)}: was it copied?",
            )
        if vocab_size != self._vocab_size:
            raise StorageError(
                folder / MANIFEST,
                "vocab_size",
                f"{vocab_size}, not {self._vocab_size}: start with --vocab-size {vocab_size}",
            )
        return store


def folder_name(namespace: Namespace) -> str:
    """The start of the model's and the tenant's names, for readers, and a digest, which is different for each namespace."""
    names = [namespace.model, namespace.tokenizer, namespace.tenant]
    digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{namespace.model}-{namespace.tenant}").strip("-.")
    return f"{readable[:_READABLE_CHARACTERS]}-{digest}"


def _was_never_used(folder: Path) -> bool:
    """Whether the creation of the folder was interrupted: it has no manifest, so nothing was ever stored in it."""
    return all(path.suffix == TEMPORARY for path in folder.iterdir())
