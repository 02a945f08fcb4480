"""A row of the host table."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSymbol:
    """A symbol of SGLang that the plugin relies on.

    path: dotted path.
    parameters: names in order for a callable, None where only existence matters.
    """

    path: str
    parameters: tuple[str, ...] | None
    why: str


def row(path: str, parameters: str | None, why: str) -> HostSymbol:
    """Makes a row of the host table.

    parameters: their names with spaces between.
    """
    return HostSymbol(path, None if parameters is None else tuple(parameters.split()), why)


def changed(
    rows: tuple[HostSymbol, ...], *others: HostSymbol, without: Collection[str] = ()
) -> tuple[HostSymbol, ...]:
    """The rows of another version: others stand for those of the same path. without: paths that it does not have."""
    left = {symbol.path for symbol in others}.union(without)
    return (*(symbol for symbol in rows if symbol.path not in left), *others)
