"""The files on the service's machine that an admin call may name: those in one folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import grpc
import numpy as np
from tokenizers import Tokenizer

from datastore_service.protocol.types import Namespace
from datastore_service.server.refusal import RefusalError, invalid, precondition, without_path
from datastore_service.storage.errors import StorageError
from datastore_service.storage.fingerprint import TOKENIZER_FILE, tokenizer_fingerprint
from datastore_service.storage.tokenizer import load_tokenizer

FOLDER = "corpora"  # of the service's data directory
PATH_BYTES = 1024


class Corpora:
    """Finds the files that an admin call names. Every method raises RefusalError naming the field.

    folder: holds the files, None if no file may be named."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def find(self, name: str, field: str) -> Path:
        """The file or folder of a relative name. Symbolic links may lead to other places in the folder, not out of it."""
        if self._folder is None:
            raise precondition(f"{field}: the service has no --data directory, so no {FOLDER}/ in it")
        _check_name(name, field)
        try:
            path = Path(os.path.realpath(self._folder / name, strict=True))
        except OSError as error:
            raise RefusalError(
                grpc.StatusCode.NOT_FOUND, f"{field}: {name!r} in {FOLDER}/: {error.strerror}"
            ) from None
        if not path.is_relative_to(os.path.realpath(self._folder)):
            raise invalid(f"{field}: {name!r} leads out of {FOLDER}/")
        return path

    def find_file(self, name: str, field: str) -> Path:
        path = self.find(name, field)
        if not path.is_file():
            raise invalid(f"{field}: {name!r} in {FOLDER}/ is not a file")
        return path

    def find_tokenizer(self, name: str, namespace: Namespace) -> Tokenizer:
        """Loads the tokenizer that a call names. It must be the namespace's tokenizer.

        name: of a tokenizer.json or of a folder with one."""
        path = self.find(name, "tokenizer")
        path = self.find_file(f"{name}/{TOKENIZER_FILE}" if path.is_dir() else name, "tokenizer")
        try:
            fingerprint, tokenizer = tokenizer_fingerprint(path), load_tokenizer(path)
        except StorageError as error:
            raise invalid(f"tokenizer: {name!r}: {without_path(error)}") from error
        if fingerprint != namespace.tokenizer:
            raise precondition(
                f"tokenizer: {name!r} is {fingerprint}, the namespace's {namespace.tokenizer!r}"
            )
        return tokenizer


def hiding_path(name: str, documents: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Passes documents on. A StorageError becomes a refusal that has the caller's name of the file, not its path."""
    try:
        yield from documents
    except StorageError as error:
        raise invalid(f"file: {name!r}: {without_path(error)}") from error


def _check_name(name: str, field: str) -> None:
    if not name:
        raise invalid(f"{field}: empty")
    if len(name.encode()) > PATH_BYTES:
        raise invalid(f"{field}: {len(name.encode())} bytes exceeds {PATH_BYTES}")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise invalid(f"{field}: {name!r} is not a path below {FOLDER}/, relative and without '..'")
