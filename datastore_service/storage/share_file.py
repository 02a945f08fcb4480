"""What a service remembers of the streams that it shares with others, in one file that is replaced atomically."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from datastore_service.engine.provenance import Subject
from datastore_service.storage.checksummed_json import (
    read_object,
    typed_fields,
    verified_fields,
    write_checksummed,
)
from datastore_service.storage.errors import StorageError

SHARE = "share.json"
FORMAT = 1
_KINDS = {"service": str, "since": int, "positions": dict, "forgetting": list}
_SERVICE = re.compile(r"(?!0{16})[0-9a-f]{16}")
_POSITION = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


@dataclass
class ShareState:
    """What a service knows of its streams.

    service: digits by which the others know this service; nobody else has them. since: outputs with a lower number are not shared.
    positions: by stream, the last message that was read. forgetting: tenants and subjects of forgets that the others were not told of."""

    service: str = field(default_factory=lambda: f"{secrets.randbits(64) | 1:016x}")
    since: int = field(default_factory=lambda: time.time_ns() // 1000)
    positions: dict[str, str] = field(default_factory=dict)
    forgetting: set[tuple[str, Subject]] = field(default_factory=set)


def read_share(path: Path) -> ShareState:
    """The state of a service, a new one's where there is no file. Raises StorageError naming the file and the field."""
    if not path.exists():
        return ShareState()
    stored = read_object(path)
    if stored["format"] != FORMAT:
        raise StorageError(path, "format", f"{stored['format']}, but there is only format {FORMAT} yet")
    fields = typed_fields(path, verified_fields(path, stored), _KINDS)
    if not _SERVICE.fullmatch(fields["service"]):
        raise StorageError(path, "service", "not 16 hexadecimal digits")
    if not all(isinstance(each, str) and _POSITION.fullmatch(each) for each in fields["positions"].values()):
        raise StorageError(path, "positions", "not positions in streams")
    fields["forgetting"] = _forgetting(path, fields["forgetting"])
    return ShareState(**fields)


def write_share(path: Path, state: ShareState) -> None:
    """Replaces the file atomically and durably. Raises OSError."""
    forgetting = sorted([tenant, str(subject)] for tenant, subject in state.forgetting)
    fields = {"service": state.service, "since": state.since, "positions": state.positions}
    write_checksummed(path, fields | {"format": FORMAT, "forgetting": forgetting})


def _forgetting(path: Path, written: list) -> set[tuple[str, Subject]]:
    try:
        return {(str(tenant), Subject.parse(subject)) for tenant, subject in written}
    except (ValueError, TypeError, AttributeError):
        raise StorageError(path, "forgetting", "not a list of tenants and subjects") from None
