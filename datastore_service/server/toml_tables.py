"""Reads tables of TOML files. Errors are ValueErrors that name the key."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any


def check_keys(given: Mapping[str, Any], known: Collection[str], prefix: str) -> None:
    """Refuses a key that is not known. prefix: of the key's name in the message."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f", did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ValueError(f"{prefix}{key}: unknown{hint}")


def mapping(given: Any, key: str) -> Mapping[str, Any]:
    """The value of a key, which must be a table."""
    if not isinstance(given, dict):
        raise ValueError(f"{key}: {given!r} is not a table")
    return given


def strings(row: Mapping[str, Any], name: str, key: str) -> list[str]:
    """The list of texts in a row, empty without one. key: of the row."""
    given = row.get(name, [])
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"{key}.{name}: {'not' if 'token' in name else f'{given!r} is not'} a list of texts")
    return given
