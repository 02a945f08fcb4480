"""The address of a Valkey or Redis server, and a client of it. This package is imported only where one is given: it needs `redis`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError
from redis.retry import Retry

from datastore_service.endpoint import Endpoint
from datastore_service.tls import Tls, client_files, warn_of_end

log = logging.getLogger(__name__)
SCHEMES = {
    "valkey": "redis",
    "redis": "redis",
    "valkeys": "rediss",
    "rediss": "rediss",
}  # with an s: over TLS
FORM = "valkey://HOST:PORT[/DATABASE], or valkeys:// for TLS"
ANSWER_SECONDS = 5.0


class ShareFiles(NamedTuple):
    """The PEM files of the options `--share-tls-*`.

    ca: the certificates that the server's is checked with; None for the system's. certificate, key: shown to a server that asks for them."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @property
    def given(self) -> list[str]:
        return [f"share-tls-{name}" for name, path in self._asdict().items() if path]

    def check(self) -> Tls:
        """What they hold. Raises ValueError naming the option of a missing, unreadable or unsuitable file."""
        return client_files("share-tls", *self)

    def warn(self) -> None:
        """Logs what the next connection will meet: a file that no longer suits, or a certificate that ends soon."""
        try:
            tls = self.check()
        except ValueError as error:
            log.warning("share: %s", error)
        else:
            warn_of_end("the certificate of share-tls-certificate", tls)


@dataclass(frozen=True, slots=True)
class ShareAddress:
    """A server, and how it is reached.

    url: with one of the schemes that the client knows. password: "" for the URL's, if there is one."""

    url: str
    password: str = ""
    files: ShareFiles = ShareFiles()

    @property
    def tls(self) -> bool:
        return urlsplit(self.url).scheme == "rediss"

    @property
    def endpoint(self) -> Endpoint:
        """The host and the port, for the log: the URL may hold a password."""
        parts = urlsplit(self.url)
        return Endpoint(parts.hostname or "", parts.port or 6379)

    def connect(self) -> Redis:
        """A client that the server has answered. Raises RedisError."""
        client = self.client()
        try:
            client.ping()
        except LostError as error:
            if type(error) is not LostError:  # a refused password is a kind of it
                raise
            raise LostError(f"{error}{self._doubt(error)}") from error
        return client

    def _doubt(self, error: LostError) -> str:
        """What a connection that was lost after the handshake may mean: in TLS 1.3 a server refuses a client only then."""
        if not self.tls or " connecting to " in str(error):
            return ""
        refused = "refuse the certificate of" if self.files.certificate else "ask for a certificate:"
        return f" The server may {refused} share-tls-certificate"

    def client(self) -> Redis:
        """Connects at its first command, with the files as they are then. It repeats none: what a lost reply leaves open is found out first.

        Raises redis' ConnectionError for files that no longer suit."""
        try:
            self.files.check()  # OpenSSL would name no file, and ask the terminal for the passphrase of a key
        except ValueError as error:
            raise LostError(str(error)) from None
        named = {"password": self.password} if self.password else {}
        words = zip(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"), self.files, strict=True)
        return Redis.from_url(
            self.url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            client_name="specstore",
            **named,
            **{word: str(path) for word, path in words if path},
        )


def parse_share(text: str, password: str, files: ShareFiles) -> ShareAddress:
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
    address = ShareAddress(url, password, files)
    if files.given and not address.tls:
        raise ValueError(f"{files.given[0]}: needs a share of valkeys:// or rediss://")
    files.check()
    return address
