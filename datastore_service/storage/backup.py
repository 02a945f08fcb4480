"""Writes a data directory to a backup store, while a service may be using it: what `specstore backup` does."""

from __future__ import annotations

import hashlib
import io
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from datastore_service.storage.backup_store import BACKUPS, CHUNK, OBJECTS, BackupStore
from datastore_service.storage.checksummed_json import (
    checksummed,
    parse_object,
    typed_fields,
    verified_fields,
)
from datastore_service.storage.directory_file import NAME as DIRECTORY_NAME
from datastore_service.storage.directory_file import read_name
from datastore_service.storage.errors import StorageError
from datastore_service.storage.open_files import OpenFile, open_files

FORMAT = 1
_NAME = re.compile(r"([0-9]{8})-[0-9]{8}T[0-9]{6}Z")
_SUFFIX = ".json"
_COMPONENT = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+"
# Who writes to a store must not be able to write elsewhere on the machine that restores.
_PATH = re.compile(
    rf"quotas\.json|prior/{_COMPONENT}|live/{_COMPONENT}/{_COMPONENT}|snapshots/{_COMPONENT}/{_COMPONENT}/{_COMPONENT}"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = {"path": str, "sha256": str, "size": int, "modified": int}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a backup. path: in the data directory. sha256: of its content, 64 hexadecimal digits. modified: nanoseconds since 1970."""

    path: str
    sha256: str
    size: int
    modified: int


@dataclass(frozen=True, slots=True)
class Backup:
    """What a backup has. created: when it began, in seconds since 1970. directory: the name of the data directory; "" if it had none."""

    name: str
    created: float
    files: tuple[StoredFile, ...]
    directory: str = ""

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Written:
    """A backup that was written. new: bytes that the store did not have. removed: names of older backups that were dropped."""

    backup: Backup
    new: int
    removed: tuple[str, ...]


def back_up(
    directory: Path,
    store: BackupStore,
    keep: int | None = None,
    progress: Callable[[OpenFile], None] = lambda _: None,
) -> Written:
    """Writes all that the directory holds of prior, live tiers, snapshots and quotas. What was acknowledged before the call is in it.

    What the store has already is not written again, and the list of the files comes last: a call that is interrupted leaves earlier
    backups as they are. keep: how many backups are kept, with this one; None keeps all. progress is called with each file before it
    is written. Raises StorageError, also for a store with backups of another data directory, OSError."""
    own = read_name(directory)
    _check_owner(store, own)
    created, present = time.time(), store.sizes(OBJECTS)
    files, new = [], 0
    for opened in open_files(directory):
        for file in opened:
            progress(file)
            digest = _digest(file.content)
            if present.get(digest) != file.size:
                file.content.seek(0)
                store.write(f"{OBJECTS}/{digest}", file.content)
                present[digest] = file.size
                new += file.size
            files.append(StoredFile(file.name, digest, file.size, file.modified))
    backup = Backup(_next_name(store, created), created, tuple(files), own)
    store.write(_place(backup.name), io.BytesIO(_encoded(backup)))
    return Written(backup, new, _drop_older(store, keep) if keep else ())


def backup_names(store: BackupStore) -> list[str]:
    """The names of a store's backups, oldest first."""
    names = (name.removesuffix(_SUFFIX) for name in store.sizes(BACKUPS) if name.endswith(_SUFFIX))
    return sorted(filter(_NAME.fullmatch, names))


def read_backup(store: BackupStore, name: str) -> Backup:
    """Raises StorageError for a backup that is not there or damaged, ValueError for what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"backup: {name[:64]!r} is not a name as `specstore backups` lists them")
    with store.reading(_place(name)) as file:
        data = file.read()
    path = store.place(_place(name))
    fields = parse_object(path, data)
    if fields["format"] != FORMAT:
        raise StorageError(path, "format", f"{fields['format']}, but there is only format {FORMAT} yet")
    kinds = {"created": float, "files": list} | ({"directory": str} if "directory" in fields else {})
    typed = typed_fields(path, verified_fields(path, fields), kinds)
    directory = typed.get("directory", "")
    if directory and not DIRECTORY_NAME.fullmatch(directory):
        raise StorageError(path, "directory", "not 16 hexadecimal digits")
    return Backup(
        name, typed["created"], tuple(_stored_file(path, each) for each in typed["files"]), directory
    )


def _stored_file(path: str, fields: object) -> StoredFile:
    if not isinstance(fields, dict):
        raise StorageError(path, "files", "not a list of objects")
    file = StoredFile(**typed_fields(path, fields, _FILE))
    if not _PATH.fullmatch(file.path) or not _DIGEST.fullmatch(file.sha256):
        raise StorageError(path, "files", f"{file.path[:200]!r} is no file of a data directory")
    return file


def _encoded(backup: Backup) -> bytes:
    files = [asdict(file) for file in backup.files]
    return checksummed(
        {"format": FORMAT, "created": backup.created, "directory": backup.directory, "files": files}
    )


def _check_owner(store: BackupStore, own: str) -> None:
    """Raises StorageError unless the newest backup is of this data directory, or of one that had no name yet."""
    names = backup_names(store)
    owner = read_backup(store, names[-1]).directory if names else ""
    if owner and owner != own:
        raise StorageError(
            store.place(BACKUPS),
            "directory",
            f"backups of the data directory {owner}, and this one is {own or 'without a name, which its service gives it at a start'}: "
            "each needs a destination of its own",
        )


def _place(name: str) -> str:
    return f"{BACKUPS}/{name}{_SUFFIX}"


def _next_name(store: BackupStore, created: float) -> str:
    """Numbers, because clocks are set back."""
    newest = (backup_names(store) or ["00000000"])[-1]
    return f"{int(newest[:8]) + 1:08d}-{datetime.fromtimestamp(created, UTC):%Y%m%dT%H%M%SZ}"


def _drop_older(store: BackupStore, keep: int) -> tuple[str, ...]:
    """Drops all backups but the newest, and the objects that none of those names. An object that is younger than they are stays: a call
    that has not ended may be about to name it."""
    names = backup_names(store)
    dropped, kept = names[:-keep], names[-keep:]
    for name in dropped:
        store.remove(_place(name))
    named = {file.sha256 for name in kept for file in read_backup(store, name).files}
    oldest = store.modified(_place(kept[0]))
    for name in set(store.sizes(OBJECTS)) - named:
        if store.modified(f"{OBJECTS}/{name}") < oldest:
            store.remove(f"{OBJECTS}/{name}")
    return tuple(dropped)


def _digest(content: BinaryIO) -> str:
    digest = hashlib.sha256()
    while part := content.read(CHUNK):
        digest.update(part)
    return digest.hexdigest()
