"""Reads the table of identities from a TOML file. docs/security.md describes its keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from datastore_service.protocol.names import MAX_NAME_BYTES
from datastore_service.server.identities import (
    ADMIN_TOKEN,
    EVERYTHING,
    Identity,
    Right,
    Table,
    Tenants,
    certificate_names,
    token_digest,
)
from datastore_service.server.json_web_tokens import ALGORITHMS, JwtKeys
from datastore_service.server.reloading import Files, Reloading
from datastore_service.server.toml_tables import check_keys, mapping, strings

TOKEN_CHARACTERS = 16  # of a token at least: whoever reads its digest must not guess it
_RIGHTS = tuple(right.value for right in Right)
_PROOFS = ("certificates", "claims", "tokens", "token_files")
_JWT = ("keys", "algorithms", "audience", "issuer")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_CERTIFICATE_NAME = re.compile(r"(dns|uri):.+")


def watched_table(path: Path, admin_token: str = "") -> Reloading[Table]:
    """The table of a file, with changes of that file and of those that it names. admin_token: has all rights; "" for none.

    Raises ValueError naming the file and the key at fault."""
    return Reloading("identities", partial(_read, path, admin_token))


def _read(path: Path, admin_token: str, files: Files) -> Table:
    try:
        return _Reader(path, files).table(admin_token)
    except ValueError as error:
        raise ValueError(f"identities: {path}: {error}") from None


class _Reader:
    """Reads one file and those that it names, which are relative to its folder. Errors are ValueErrors that name the key."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path, self._files = path, files

    def table(self, admin_token: str) -> Table:
        try:
            given = tomllib.loads(self._text(self._path))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        check_keys(given, ("identities", "jwt"), "")
        rows = mapping(given.get("identities", {}), "identities")
        identities = [self._identity(name, row) for name, row in rows.items()]
        keys = self._jwt_keys(given["jwt"]) if "jwt" in given else None
        _check_identities(identities, keys is not None)
        if admin_token:
            identities.append(Identity(ADMIN_TOKEN, EVERYTHING, tokens=(token_digest(admin_token),)))
        return Table(identities, keys.claims if keys else None)

    def _identity(self, name: str, given: Any) -> Identity:
        key = f"identities.{name}"
        if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES or name == ADMIN_TOKEN:
            raise ValueError(
                f"{key}: a name has 1 to {MAX_NAME_BYTES} printable bytes and is not {ADMIN_TOKEN!r}"
            )
        row = mapping(given, key)
        check_keys(row, (*_PROOFS, *_RIGHTS), f"{key}.")
        if not any(row.get(proof) for proof in _PROOFS):
            raise ValueError(f"{key}: proven by nothing; give one of {', '.join(_PROOFS)}")
        names, claims = strings(row, "certificates", key), _claims(row, key)
        for i, pattern in enumerate(names):
            if not _CERTIFICATE_NAME.fullmatch(pattern):
                raise ValueError(f"{key}.certificates[{i}]: {pattern!r} is neither dns:NAME nor uri:NAME")
        rights = {right: strings(row, right.value, key) for right in Right}
        return Identity(
            name,
            {right: Tenants(patterns) for right, patterns in rights.items() if patterns},
            certificate_names(names) if names else None,
            claims,
            self._tokens(row, key),
        )

    def _tokens(self, row: Mapping[str, Any], key: str) -> tuple[str, ...]:
        digests = []
        for i, given in enumerate(strings(row, "tokens", key)):
            if not (digest := _DIGEST.fullmatch(given)):  # it may be a token: it is not shown
                raise ValueError(f"{key}.tokens[{i}]: not sha256: and 64 hexadecimal digits")
            digests.append(digest[1])
        for i, name in enumerate(strings(row, "token_files", key)):
            token = self._named(name, f"{key}.token_files[{i}]").decode(errors="replace").strip()
            if len(token) < TOKEN_CHARACTERS or not (token.isascii() and token.isprintable()):
                raise ValueError(
                    f"{key}.token_files[{i}]: {name}: a token has {TOKEN_CHARACTERS} printable ASCII characters or more"
                )
            digests.append(token_digest(token))
        return tuple(digests)

    def _jwt_keys(self, given: Any) -> JwtKeys:
        row = mapping(given, "jwt")
        check_keys(row, _JWT, "jwt.")
        algorithms = strings(row, "algorithms", "jwt")
        if not algorithms or not set(algorithms) <= set(ALGORITHMS):
            raise ValueError(f"jwt.algorithms: {algorithms} is not some of {', '.join(ALGORITHMS)}")
        texts = {name: row.get(name, "") for name in ("keys", "audience", "issuer")}
        for name, text in texts.items():
            if not isinstance(text, str) or (name in row and not text):
                raise ValueError(f"jwt.{name}: {text!r} is not a text")
        data = self._named(texts["keys"], "jwt.keys")
        try:
            return JwtKeys(data, algorithms, texts["audience"], texts["issuer"])
        except ValueError as error:
            raise ValueError(f"jwt.keys: {texts['keys']}: {error}") from None

    def _named(self, name: str, key: str) -> bytes:
        """The content of a file that the table names."""
        if not name:
            raise ValueError(f"{key}: no file")
        try:
            return self._files.read(self._path.parent / name)
        except OSError as error:
            raise ValueError(f"{key}: {name}: {error.strerror}") from None

    def _text(self, path: Path) -> str:
        try:
            return self._files.read(path).decode()
        except OSError as error:
            raise ValueError(error.strerror) from None
        except UnicodeDecodeError:
            raise ValueError("not UTF-8") from None


def _check_identities(identities: Collection[Identity], jwt: bool) -> None:
    if not identities:
        raise ValueError("identities: none; nobody could do anything")
    owners: dict[str, str] = {}
    for identity in identities:
        if identity.claims and not jwt:
            raise ValueError(f"identities.{identity.name}.claims: needs [jwt], whose keys prove them")
        for token in identity.tokens:
            if (owner := owners.setdefault(token, identity.name)) != identity.name:
                raise ValueError(f"identities.{identity.name}: has a token of identities.{owner}")


def _claims(row: Mapping[str, Any], key: str) -> Mapping[str, str]:
    claims = mapping(row.get("claims", {}), f"{key}.claims")
    for claim, value in claims.items():
        if not isinstance(value, str):
            raise ValueError(f"{key}.claims.{claim}: {value!r} is not a text")
    return claims
