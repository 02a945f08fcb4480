"""Addresses of a datastore, as client, server and command line spell them."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import quote

FORMS = "HOST:PORT or unix:PATH"
# A socket's path and its final zero must fit into sockaddr_un.sun_path.
UNIX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and port of a TCP endpoint, or the path of a Unix socket (host is "" then, and port 0)."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        """The endpoint as operators spell it."""
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The endpoint as gRPC spells it, which takes a socket's path for part of a URI."""
        return f"unix:{quote(os.fsencode(self.path))}" if self.path else str(self)

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name that only the resolver knows
            return False


def parse_endpoint(text: str, field: str = "endpoint") -> Endpoint:
    """Reads "HOST:PORT", "[IPV6]:PORT" or "unix:PATH". Raises ValueError naming `field`."""
    if text.startswith("unix:"):
        return Endpoint(path=_socket_path(text.removeprefix("unix:"), field))
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or "/" in host:
        raise ValueError(f"{field}: {text!r} is not {FORMS}")
    if int(port) > 65535:
        raise ValueError(f"{field}: port {port} exceeds 65535")
    return Endpoint(host=host, port=int(port))


def parse_endpoints(text: str, field: str = "endpoint") -> dict[str, Endpoint]:
    """Reads endpoints separated by commas. The keys are the endpoints as given. Raises ValueError naming `field`."""
    words = [word.strip() for word in text.split(",")]
    if len(set(words)) < len(words):
        raise ValueError(f"{field}: {text!r} names an endpoint twice")
    return {word: parse_endpoint(word, field) for word in words}


def _socket_path(path: str, field: str) -> str:
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    if not path:
        raise ValueError(f"{field}: unix: without a path")
    if "," in path or "\0" in path:  # gRPC would take it for the addresses of several, or end it there
        raise ValueError(f"{field}: socket path {path!r} has a comma or a NUL")
    if (length := len(os.fsencode(path))) > UNIX_PATH_BYTES:
        raise ValueError(f"{field}: socket path of {length} bytes exceeds {UNIX_PATH_BYTES}")
    return path
