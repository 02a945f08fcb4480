"""Checks that an address may and can be listened on. gRPC alone would only say in its own log why it cannot."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from datastore_service.endpoint import Endpoint


def check_exposure(address: Endpoint, guarded: bool, allow_remote: bool) -> None:
    """Raises ValueError if other machines can reach the address and that is not allowed or admin calls are open to all.

    guarded: whether there is an admin token or a table of identities."""
    if address.local:
        return
    if not allow_remote:
        raise ValueError(f"listen: {address} is reachable from other machines; --allow-remote permits that")
    if not guarded:
        raise ValueError(f"admin token: it or --identities is required to listen on {address}")


def check_free(address: Endpoint) -> None:
    """Raises OSError with the reason if the address cannot be listened on."""
    try:
        _check_path(Path(address.path)) if address.path else _check_port(address)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from None


def _check_port(address: Endpoint) -> None:
    """A name may have several addresses; gRPC needs one that is free."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    errors = [error for family, kind, _, _, target in found if (error := _bind_error(family, kind, target))]
    if len(errors) == len(found):
        raise errors[0]


def _bind_error(family: int, kind: int, target: tuple) -> OSError | None:
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(target)
    except OSError as error:
        return error
    return None


def _check_path(path: Path) -> None:
    """An existing socket is replaced."""
    if path.exists() and not path.is_socket():
        raise OSError(errno.EEXIST, "there is a file that is no socket")
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, f"{path.parent} is no directory")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
