"""Encrypts what lies in a data directory: files that are not encrypted, or with a key that is no longer the first.

Each file is replaced atomically, so an interrupted run is simply repeated.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from datastore_service.storage.atomic import TEMPORARY, sync_directory
from datastore_service.storage.encrypted_file import find_encrypted, read_whole, writing
from datastore_service.storage.encryption_keys import OperatorKeys, TextKeys
from datastore_service.storage.errors import StorageError
from datastore_service.storage.live_manifest import LiveManifest, read_live_manifest
from datastore_service.storage.live_segment import parse_provenance, provenance_path
from datastore_service.storage.log import LOG_NAME, log_cipher, rewrite_log
from datastore_service.storage.segment_file import SUFFIX, verify_content

log = logging.getLogger(__name__)


class _Due(NamedTuple):
    """A file that is to be encrypted."""

    path: Path
    manifest: LiveManifest
    keys: TextKeys


def encrypt_folders(live: Iterable[Path], snapshots: Iterable[Path], keys: OperatorKeys) -> int:
    """Encrypts the files that the manifests of these folders name; returns how many. Without keys it only looks.

    Raises StorageError for a file whose key is missing or wrong, before anything is written, and for a damaged one of the live tiers. A
    damaged snapshot is left as it is, with a line in the log. Raises OSError."""
    due = [file for folder in live for file in _due(folder, keys)]
    of_snapshots: list[_Due] = []
    for folder in snapshots:
        with _leaving_damaged():
            of_snapshots += _due(folder, keys)
    done: dict[tuple[int, int], Path] = {}
    for file in due:
        _encrypt(file, done)
    for file in of_snapshots:
        with _leaving_damaged():
            _encrypt(file, done)
    return len(done)


@contextmanager
def _leaving_damaged() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if error.field == "key":
            raise
        log.error("damaged snapshot, not encrypted: %s", error)


def _due(folder: Path, keys: OperatorKeys) -> list[_Due]:
    manifest = read_live_manifest(folder)
    own = keys.of(manifest.namespace)
    return [
        _Due(path, manifest, own) for path in _valid(folder, manifest) if _key_of(path, own) != own.newest
    ]


def _valid(folder: Path, manifest: LiveManifest) -> Iterator[Path]:
    for segment in (folder / name for name in manifest.segments):
        yield segment
        if manifest.format > 1 or provenance_path(segment).exists():
            yield provenance_path(segment)
    for path in folder.iterdir():
        number = LOG_NAME.fullmatch(path.name)
        if number and int(number[1]) >= manifest.first_log:
            yield path


def _key_of(path: Path, keys: TextKeys) -> str:
    """The name of the key that a file is encrypted with, "" for none."""
    found = log_cipher(path, keys) if LOG_NAME.fullmatch(path.name) else find_encrypted(path, keys)
    return found.key if found else ""


def _encrypt(due: _Due, done: dict[tuple[int, int], Path]) -> None:
    """Encrypts a file, or links it to one that was the same file. done: these, by what they were before."""
    # What an interrupted start has left may be a second name of a file that counts: nothing may be written into it.
    _temporary(due.path).unlink(missing_ok=True)
    status = due.path.stat()
    before = status.st_dev, status.st_ino
    if before in done:
        _link(done[before], due.path)
        return
    if LOG_NAME.fullmatch(due.path.name):
        rewrite_log(due.path, due.manifest.tokenizer, due.manifest.vocab_size, due.keys)
    else:
        _rewrite(due.path, due.keys, status.st_mtime_ns)
    done[before] = due.path


def _rewrite(path: Path, keys: TextKeys, modified: int) -> None:
    """What is damaged would pass for intact, so it is verified first."""
    content = read_whole(path, keys)
    if find_encrypted(path, keys) is None:
        _verify(path, content)
    with writing(path, keys, len(content), modified) as file:
        file.write(content)


def _verify(path: Path, content: bytes) -> None:
    if path.suffix == SUFFIX:
        verify_content(io.BytesIO(content), path)
    else:
        parse_provenance(path, content)


def _link(source: Path, path: Path) -> None:
    os.link(source, _temporary(path))
    os.replace(_temporary(path), path)
    sync_directory(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY)
