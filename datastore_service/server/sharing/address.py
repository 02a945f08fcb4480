"""The address of a Valkey or Redis server, and a client of it. This package is imported only where one is given: it needs `redis`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from datastore_service.endpoint import Endpoint

SCHEMES = {
    "valkey": "redis",
    "redis": "redis",
    "valkeys": "rediss",
    "rediss": "rediss",
}  # with an s: over TLS
FORM = "valkey://HOST:PORT[/DATABASE], or valkeys:// for TLS"
ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ShareAddress:
    """A server, and how it is reached.

    url: with one of the schemes that the client knows. password: "" for the URL's, if there is one. authority: the certificates that
    the server's is checked with; None for the system's."""

    url: str
    password: str = ""
    authority: Path | None = None

    @property
    def tls(self) -> bool:
        return urlsplit(self.url).scheme == "rediss"

    @property
    def endpoint(self) -> Endpoint:
        """The host and the port, for the log: the URL may hold a password."""
        parts = urlsplit(self.url)
        return Endpoint(parts.hostname or "", parts.port or 6379)

    def client(self) -> Redis:
        """Connects at its first command. It repeats none: what a lost reply leaves open is found out first."""
        named = {"password": self.password} if self.password else {}
        trusted = {"ssl_ca_certs": str(self.authority)} if self.authority else {}
        return Redis.from_url(
            self.url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            client_name="specstore",
            **named,
            **trusted,
        )


def parse_share(text: str, password: str = "", authority: Path | None = None) -> ShareAddress:
    """Reads the value of `--share`. Raises ValueError that names the option; a password in the URL is not repeated."""
    parts = urlsplit(text)
    if parts.scheme not in SCHEMES or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"share: not {FORM}")
    if not parts.path.removeprefix("/").isdigit() and parts.path not in ("", "/"):
        raise ValueError(f"share: database {parts.path.removeprefix('/')!r} is not a number")
    try:
        parts.port  # noqa: B018
    except ValueError as error:
        raise ValueError(f"share: {error}") from None
    url = urlunsplit(parts._replace(scheme=SCHEMES[parts.scheme]))
    address = ShareAddress(url, password, authority)
    if authority and not address.tls:
        raise ValueError("share-tls-ca: needs a share of valkeys:// or rediss://")
    if authority and not authority.is_file():
        raise ValueError(f"share-tls-ca: {authority}: no such file")
    return address
