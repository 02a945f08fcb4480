"""The keys of an operator's file, and those of namespaces that are derived of them (HKDF-SHA-256, RFC 5869).

A line of the file is a key's name and its 32 bytes in base64. The first key encrypts, all of them decrypt.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from datastore_service.protocol.types import Namespace

log = logging.getLogger(__name__)

OPTION = "encryption-keys"
SECRET_BYTES = 32
NAME_BYTES = 16
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_BYTES}}}")
_OF_NAMESPACE = "specstore namespace"


@dataclass(frozen=True, slots=True)
class TextKeys:
    """The keys of one namespace's files, by name; the first one encrypts. Without any, files are written as they are.

    source: what errors call the file that lacks a key."""

    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    source: str = ""

    @property
    def newest(self) -> str:
        """The name of the key that encrypts, "" if none does."""
        return next(iter(self.secrets), "")


UNENCRYPTED = TextKeys()


@dataclass(frozen=True, slots=True)
class OperatorKeys:
    """An operator's keys, by name, the one that encrypts first. source: the file that they are from."""

    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    source: str = ""

    def of(self, namespace: Namespace) -> TextKeys:
        """The keys of a namespace. Who has one of them can derive neither the operator's key nor another namespace's."""
        names = [_OF_NAMESPACE, namespace.model, namespace.tokenizer, namespace.tenant]
        info = json.dumps(names).encode()
        secrets = {name: derived(secret, b"", info) for name, secret in self.secrets.items()}
        return TextKeys(secrets, self.source)


NO_KEYS = OperatorKeys()


def derived(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """A key of 32 bytes that says nothing of the one it is derived of."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), SECRET_BYTES, salt, info).derive(secret)


def read_keys(path: Path) -> OperatorKeys:
    """The keys of a file. Raises ValueError naming the file and the line at fault, never what is in it; OSError."""
    if path.stat().st_mode & stat.S_IRWXO:
        log.warning("%s: every user of this machine may read the encryption keys in it", path)
    try:
        keys = list(_keys(path.read_text("ascii")))
    except ValueError as error:
        why = "not ASCII" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{OPTION}: {path}: {why}") from None
    secrets = dict(keys)
    if not secrets:
        raise ValueError(f"{OPTION}: {path}: no key in it")
    if len(secrets) < len(keys):
        raise ValueError(f"{OPTION}: {path}: two keys have one name")
    return OperatorKeys(secrets, str(path))


def _keys(text: str) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            yield _key(f"line {number}", words)


def _key(place: str, words: list[str]) -> tuple[str, bytes]:
    if len(words) != 2:
        raise ValueError(f"{place}: {len(words)} words, not a name and a key")
    name, encoded = words
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{place}: a name has 1 to {NAME_BYTES} letters, digits, dots, dashes and underscores"
        )
    try:
        secret = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ValueError(f"{place}: the key is not base64") from None
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{place}: the key has {len(secret)} bytes, not {SECRET_BYTES}")
    return name, secret
