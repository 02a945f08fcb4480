"""Reads the table of the priors that requests may name (`specstore serve --priors`) from a TOML file. docs/requests.md describes it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from datastore_service.protocol.names import MAX_NAME_BYTES
from datastore_service.server.identities import Tenants
from datastore_service.server.toml_tables import check_keys, mapping, strings

TABLE = "priors"


class NamedPrior(NamedTuple):
    """A prior that requests may name. tenants: whose requests."""

    directory: Path
    tenants: Tenants


def read_priors(path: Path) -> dict[str, NamedPrior]:
    """The priors of a file, by name. Raises ValueError naming the file and the key at fault, OSError for an unreadable file."""
    try:
        given = tomllib.loads(path.read_text("utf-8"))
        check_keys(given, (TABLE,), "")
        rows = mapping(given.get(TABLE, {}), TABLE)
        return {name: _prior(name, row, path.parent) for name, row in rows.items()}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"priors: {path}: {error}") from None


def _prior(name: str, given: Any, folder: Path) -> NamedPrior:
    key = f"{TABLE}.{name}"
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES or not name.isprintable():
        raise ValueError(f"{key}: a name has 1 to {MAX_NAME_BYTES} printable bytes")
    row = mapping(given, key)
    check_keys(row, NamedPrior._fields, f"{key}.")
    directory, tenants = row.get("directory"), strings(row, "tenants", key)
    if not isinstance(directory, str) or not directory:
        raise ValueError(f"{key}.directory: {directory!r} is not a text")
    if not tenants:
        raise ValueError(f"{key}.tenants: nobody may name it; give their names, or '*' for all")
    return NamedPrior(folder / directory, Tenants(tenants))
