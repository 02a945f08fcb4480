"""The quotas of tenants, in one file that is replaced atomically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from datastore_service.storage.checksummed_json import (
    read_object,
    typed_fields,
    verified_fields,
    write_checksummed,
)
from datastore_service.storage.errors import StorageError

QUOTAS = "quotas.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may have in all its namespaces. A part that is None does not bound it.

    live_bytes: of live text, LIVE_TOKEN bytes a token. sessions: open at a time. streams: of drafts, at a time, whose namespace is
    the tenant's. outputs_per_second: outputs of sessions that enter the live tier. messages_per_second: of these streams, at least 1; raises
    ValueError for 0."""

    live_bytes: int | None = None
    sessions: int | None = None
    streams: int | None = None
    outputs_per_second: int | None = None
    messages_per_second: int | None = None

    def __post_init__(self) -> None:
        if self.messages_per_second == 0:  # who may not draft may have no stream
            raise ValueError("messages_per_second: 0 is below 1")

    def bounds(self) -> dict[str, int]:
        """The parts that are not None."""
        return {part: limit for part, limit in asdict(self).items() if limit is not None}


PARTS = tuple(part.name for part in fields(Quota))


def read_quotas(path: Path) -> dict[str, Quota]:
    """The quota of each tenant that has one; none where there is no file. Raises StorageError naming the file and the field."""
    if not path.exists():
        return {}
    stored = read_object(path)
    if stored["format"] != FORMAT:
        raise StorageError(path, "format", f"{stored['format']}, but there is only format {FORMAT} yet")
    quotas = typed_fields(path, verified_fields(path, stored), {"quotas": dict})["quotas"]
    return {tenant: _quota(path, tenant, bounds) for tenant, bounds in quotas.items()}


def write_quotas(path: Path, quotas: Mapping[str, Quota]) -> None:
    """Replaces the file atomically and durably. Raises OSError."""
    bounds = {tenant: quota.bounds() for tenant, quota in quotas.items()}
    write_checksummed(path, {"format": FORMAT, "quotas": bounds})


def _quota(path: Path, tenant: str, bounds: object) -> Quota:
    if not isinstance(bounds, dict):
        raise StorageError(path, "quotas", f"{tenant!r}: {bounds!r} is not an object")
    for part in bounds:
        if part not in PARTS:
            raise StorageError(path, "quotas", f"{part!r} is not one of {', '.join(PARTS)}")
    try:
        return Quota(**typed_fields(path, bounds, dict.fromkeys(bounds, int)))
    except ValueError as error:
        raise StorageError(path, "quotas", f"{tenant!r}: {error}") from error
