"""The files of a data directory, opened while a service may be writing there.

Segments never change, logs only grow, and a manifest is replaced before what it named is removed. So the files that were open while
the manifest stayed the same are those of one moment, and stay readable after they are removed. Nothing is locked or written.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from datastore_service.storage.atomic import TEMPORARY
from datastore_service.storage.data_directory import LIVE, NAMESPACE_FOLDER, PRIOR, SNAPSHOTS
from datastore_service.storage.encrypted_file import verify_encrypted
from datastore_service.storage.errors import StorageError
from datastore_service.storage.file_cipher import MAGIC, is_encrypted
from datastore_service.storage.live_manifest import MANIFEST, LiveManifest, read_live_manifest
from datastore_service.storage.live_segment import parse_provenance, provenance_path
from datastore_service.storage.log import LOG_NAME, complete_bytes
from datastore_service.storage.manifest import read_manifest
from datastore_service.storage.quota_file import QUOTAS, read_quotas
from datastore_service.storage.segment_file import verify_content
from datastore_service.storage.snapshots import snapshot_folders

Check = Callable[[BinaryIO, Path], BinaryIO]  # returns what is to be kept of an open file
Named = dict[Path, Check]


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that matches its checksums, as it was at one moment.

    name: its path in the data directory, with slashes. modified: nanoseconds since 1970."""

    name: str
    content: BinaryIO
    size: int
    modified: int


def open_files(directory: Path) -> Iterator[list[OpenFile]]:
    """The files of each folder with a manifest, and the quotas. They are open until the next are asked for.

    Raises StorageError for a damaged file and for what is no data directory, OSError."""
    if not (directory / LIVE).is_dir():
        raise StorageError(directory, "directory", f"no data directory of a service: it has no {LIVE}/")
    for manifest, named in _manifests(directory):
        with ExitStack() as stack:
            yield [_checked(directory, *each) for each in _opened(manifest, named, stack)]


def _manifests(directory: Path) -> Iterator[tuple[Path, Callable[[Path], Named]]]:
    """Each file that is replaced atomically, and what finds the files that it names."""
    yield directory / QUOTAS, _of_quotas
    yield directory / PRIOR / MANIFEST, _of_prior
    for folder in sorted((directory / LIVE).iterdir()):
        if NAMESPACE_FOLDER.fullmatch(folder.name) and folder.suffix != TEMPORARY:
            yield folder / MANIFEST, _of_live_text
    for folder in sorted((directory / SNAPSHOTS).glob("*")):
        for snapshot in sorted(snapshot_folders(folder)):
            yield snapshot / MANIFEST, _of_live_text


def _opened(
    manifest: Path, named: Callable[[Path], Named], stack: ExitStack
) -> list[tuple[Path, BinaryIO, Check]]:
    """The manifest and what it names, all of one moment. Nothing if the manifest is not there: it never was, or its folder was removed."""
    while True:
        with ExitStack() as opened:
            try:
                first = opened.enter_context(open(manifest, "rb"))
            except FileNotFoundError:
                return []
            try:
                checks = named(manifest)
                files = [(path, opened.enter_context(open(path, "rb")), checks[path]) for path in checks]
            except (FileNotFoundError, StorageError):
                if _is_still(manifest, first):
                    raise
                continue
            if _is_still(manifest, first):
                stack.push(opened.pop_all())
                return [*files, (manifest, first, _whole)]


def _is_still(path: Path, file: BinaryIO) -> bool:
    """Whether the path names the open file. Its inode is not used again while it is open."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _checked(directory: Path, path: Path, file: BinaryIO, check: Check) -> OpenFile:
    modified = os.fstat(file.fileno()).st_mtime_ns
    content = check(file, path)
    size = content.seek(0, os.SEEK_END)
    content.seek(0)
    return OpenFile(path.relative_to(directory).as_posix(), content, size, modified)


def _of_quotas(path: Path) -> Named:
    read_quotas(path)
    return {}


def _of_prior(manifest: Path) -> Named:
    return {manifest.parent / name: _segment for name in read_manifest(manifest.parent).segments}


def _of_live_text(path: Path) -> Named:
    folder = path.parent
    manifest = read_live_manifest(folder)
    named: Named = {}
    for segment in (folder / name for name in manifest.segments):
        named[segment] = _segment
        if manifest.format > 1 or provenance_path(segment).exists():
            named[provenance_path(segment)] = _provenance
    for log in folder.iterdir():
        number = LOG_NAME.fullmatch(log.name)
        if number and int(number[1]) >= manifest.first_log:
            named[log] = partial(_log, manifest)
    return named


def _whole(file: BinaryIO, path: Path) -> BinaryIO:
    return file


def _segment(file: BinaryIO, path: Path) -> BinaryIO:
    if _is_encrypted(file):
        verify_encrypted(file, path)
    else:
        verify_content(file, path)
    return file


def _provenance(file: BinaryIO, path: Path) -> BinaryIO:
    if _is_encrypted(file):
        verify_encrypted(file, path)
    else:
        parse_provenance(path, file.read())
    return file


def _is_encrypted(file: BinaryIO) -> bool:
    encrypted = is_encrypted(file.read(len(MAGIC)))
    file.seek(0)
    return encrypted


def _log(manifest: LiveManifest, file: BinaryIO, path: Path) -> BinaryIO:
    """The complete records: another may be in the middle of its writing."""
    data = file.read()
    return io.BytesIO(data[: complete_bytes(path, data, manifest.tokenizer, manifest.vocab_size)])
