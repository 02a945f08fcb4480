"""Assigns sessions to services. Every instance with the same endpoints assigns a session to the same service."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from datastore_service.protocol.types import Entry, Opening


def affinity_key(entry: Entry, opening: Opening | None) -> str:
    """The key that decides which service gets a session: its group, so that siblings find each other, its conversation, so that the next
    request finds the history, or its name."""
    return (opening.group or opening.conversation if opening else "") or entry.session


def ranked(key: str, endpoints: Iterable[str]) -> list[str]:
    """The endpoints in order of preference for `key`, by highest random weight (Thaler and Ravishankar, 1998): if an
    endpoint leaves, only its own keys move, and they spread over the others."""
    return sorted(endpoints, key=lambda endpoint: _weight(key, endpoint), reverse=True)


def _weight(key: str, endpoint: str) -> bytes:
    return blake2b(f"{endpoint}\n{key}".encode(), digest_size=8).digest()
