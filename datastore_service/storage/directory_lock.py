"""One writer a directory."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from datastore_service.storage.errors import StorageError

LOCK = "lock"
_LOCKS_NO_DIRECTORIES = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP}


class DirectoryLock:
    """Keeps every other writer out of a directory until it is closed or its process ends.

    The lock is on the directory itself, which nobody can remove under a writer without its files. Network file systems that lock files
    alone (NFS) get a file `lock` in the directory instead. Raises StorageError if another process has the lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._descriptor = self._locked(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            if error.errno not in _LOCKS_NO_DIRECTORIES:
                raise
            self._descriptor = self._locked(os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666))

    def _locked(self, descriptor: int) -> int:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise StorageError(self._directory, "lock", "another process writes here") from None
            raise
        return descriptor

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
