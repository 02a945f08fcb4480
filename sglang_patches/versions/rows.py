"""A row of the host table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSymbol:
    """path: dotted path. parameters: names in order for a callable, None where only existence matters."""

    path: str
    parameters: tuple[str, ...] | None
    why: str


def row(path: str, parameters: str | None, why: str) -> HostSymbol:
    """parameters: their names with spaces between."""
    return HostSymbol(path, None if parameters is None else tuple(parameters.split()), why)
