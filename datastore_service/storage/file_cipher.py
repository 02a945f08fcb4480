"""Encrypts one file by AES-256-GCM, with a key that no other file has. docs/storage-format.md describes every byte.

The key of a file is derived of its namespace's key, a random salt and what the file is. So a part of it authenticates in no other file, and
its nonces are plain numbers: they need only differ within the file.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from isal.isal_zlib import crc32

from datastore_service.storage.encryption_keys import OPTION, TextKeys, derived
from datastore_service.storage.errors import StorageError

MAGIC = b"SPECENC\x00"
VERSION = 1
_SALT_BYTES = 32
_FIXED = struct.Struct("<8sI16s32sQ")  # magic, version, name of the key, salt, bytes that are encrypted
TAG_BYTES = 16  # that encryption adds
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIXED.size + TAG_BYTES + _CHECKSUM.size
_OF_HEADER = 0  # the nonce of the header's tag


class FileCipher:
    """Encrypts and decrypts the parts of a file.

    header: what stands before them. length: bytes that are encrypted, 0 for a file that grows. key: its name."""

    def __init__(self, header: bytes, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self.header, self._aes = header, AESGCM(secret)
        _, _, name, _, self.length = _FIXED.unpack_from(header)
        self.key = _name(name)

    def encrypt(self, number: int, data: bytes | bytearray, place: bytes = b"") -> bytes:
        """Encrypts a part. number: from 1, another one at each call. place: where the part stands, unless the number says it."""
        return self._aes.encrypt(_nonce(number), data, place)

    def decrypt(self, path: Path, offset: int, number: int, data: bytes, place: bytes = b"") -> bytes:
        """Raises StorageError for what was not encrypted so. path, offset: what the error names."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aes.decrypt(_nonce(number), data, place)
        except InvalidTag:
            raise StorageError(
                path, f"offset {offset}", "does not authenticate, the file was changed"
            ) from None


def new_cipher(keys: TextKeys, kind: str, length: int = 0) -> FileCipher:
    """A cipher for a new file, with the newest key. kind: what the file is; a reader must say the same."""
    fixed = _FIXED.pack(MAGIC, VERSION, keys.newest.encode(), os.urandom(_SALT_BYTES), length)
    secret = _secret_of(fixed, keys.secrets[keys.newest], kind)
    header = fixed + FileCipher(fixed, secret).encrypt(_OF_HEADER, b"", fixed)
    return FileCipher(header + _CHECKSUM.pack(crc32(header)), secret)


def read_cipher(path: Path, header: bytes, keys: TextKeys, kind: str) -> FileCipher:
    """The cipher of a file that was encrypted. Raises StorageError for a damaged header, and naming the key that is missing or wrong.

    header: the file's first HEADER_BYTES, or of a log those after its own header."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    name = key_of(path, header)
    if name not in keys.secrets:
        where = f"which {keys.source} has not" if keys.source else f"give it with --{OPTION}"
        raise StorageError(path, "key", f"encrypted with the key {name!r}, {where}")
    secret = _secret_of(header, keys.secrets[name], kind)
    fixed, tag = header[: _FIXED.size], header[_FIXED.size : _FIXED.size + TAG_BYTES]
    try:
        AESGCM(secret).decrypt(_nonce(_OF_HEADER), tag, fixed)
    except InvalidTag:
        raise StorageError(
            path,
            "key",
            f"{name!r} of {keys.source} is not the key of that name that encrypted it, or it is a file of another place",
        ) from None
    return FileCipher(header, secret)


def is_encrypted(data: bytes) -> bool:
    """Whether a file that begins so is encrypted."""
    return data.startswith(MAGIC)


def key_of(path: Path, header: bytes) -> str:
    """The name of the key that encrypted a file. Raises StorageError for a damaged header."""
    if len(header) < HEADER_BYTES:
        raise StorageError(path, "length", f"{len(header)} bytes, shorter than the header's {HEADER_BYTES}")
    magic, version, name, _, _ = _FIXED.unpack_from(header)
    (checksum,) = _CHECKSUM.unpack_from(header, HEADER_BYTES - _CHECKSUM.size)
    if magic != MAGIC or checksum != crc32(header[: HEADER_BYTES - _CHECKSUM.size]):
        raise StorageError(path, "header", "checksum does not match, the file is damaged")
    if version != VERSION:
        raise StorageError(path, "version", f"encrypted as {version}, this program reads {VERSION}")
    return _name(name)


def length_of(header: bytes) -> int:
    """How many bytes are encrypted in a file, 0 for one that grows."""
    *_, length = _FIXED.unpack_from(header)
    return length


def _name(field: bytes) -> str:
    return field.rstrip(b"\x00").decode("ascii")


def _secret_of(header: bytes, secret: bytes, kind: str) -> bytes:
    _, _, _, salt, _ = _FIXED.unpack_from(header)
    return derived(secret, salt, b"file " + kind.encode())


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
