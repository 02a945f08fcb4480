"""The place that backups are written to: a folder or an object store, by `fsspec`.

backups/NUMBER-TIME.json    what a backup has; written last
objects/SHA-256             contents of files, each once for all backups
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from datastore_service.storage.atomic import atomic_write, sync_directory
from datastore_service.storage.errors import StorageError

BACKUPS, OBJECTS = "backups", "objects"
CHUNK = 1 << 20


class BackupStore:
    """A folder or an object store. What its library raises becomes StorageError.

    url: of fsspec, or a path. Raises ValueError for a URL that nothing here can open."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ModuleNotFoundError:
            raise ValueError("backup: needs fsspec: pip install 'specstore[backup]'") from None
        self._url = url.rstrip("/") or url
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ValueError(f"backup: {url}: {error}") from error
        self._root = str(root).rstrip("/")

    def place(self, name: str) -> str:
        """What errors call a file."""
        return f"{self._url}/{name}"

    def sizes(self, folder: str) -> dict[str, int]:
        """The files of a folder, by name, and their bytes. A folder that is not there has none."""
        with self._reporting(folder):
            self._files.invalidate_cache()
            found = self._files.find(f"{self._root}/{folder}", detail=True)
            return {path.rpartition("/")[2]: int(info["size"]) for path, info in found.items()}

    def modified(self, name: str) -> datetime:
        with self._reporting(name):
            return self._files.modified(f"{self._root}/{name}")

    def write(self, name: str, content: BinaryIO) -> None:
        """Writes a file that is there as a whole or not at all, as far as the store can; in a folder it survives a power failure."""
        with self._reporting(name), self._writing(f"{self._root}/{name}") as file:
            shutil.copyfileobj(content, file, CHUNK)

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with self._reporting(name), self._files.open(f"{self._root}/{name}", "rb") as file:
            yield file

    def remove(self, name: str) -> None:
        with self._reporting(name):
            self._files.rm_file(f"{self._root}/{name}")

    @contextmanager
    def _writing(self, path: str) -> Iterator[BinaryIO]:
        if getattr(self._files, "local_file", False):
            _make_folder(Path(path).parent)
            with atomic_write(Path(path)) as file:
                yield file
        else:
            with self._files.open(path, "wb") as file:
                yield file

    @contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """Each store's package has errors of its own."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(self.place(name), "store", f"{type(error).__name__}: {error}") from error


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it durably."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)
