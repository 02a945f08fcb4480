"""Which of several services has a session: the same answer on every instance that knows the same endpoints."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from datastore_service.protocol.types import Entry, Opening


def affinity_key(entry: Entry, opening: Opening | None) -> str:
    """What decides where a session goes: its conversation, so that the next request finds the history, else its name."""
    return (opening.conversation if opening else "") or entry.session


def ranked(key: str, endpoints: Iterable[str]) -> list[str]:
    """The endpoints in the order in which they are to serve `key`, by highest random weight (Thaler and Ravishankar,
    1998): one that goes takes only its own keys with it, and they spread over the others."""
    return sorted(endpoints, key=lambda endpoint: _weight(key, endpoint), reverse=True)


def _weight(key: str, endpoint: str) -> bytes:
    return blake2b(f"{endpoint}\n{key}".encode(), digest_size=8).digest()
