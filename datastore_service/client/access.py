"""What a client shows to a service: a certificate, a token or a JWT, and whom it trusts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datastore_service.tls import Tls

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Access:
    """How a client reaches a service. tls: None for plain text. token: shown with each call, "" for none."""

    tls: Tls | None = None
    token: str = ""

    @property
    def metadata(self) -> Metadata:
        """What shows the token in a call's metadata."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


AccessSource = Callable[[], Access]  # reads its files; raises OSError and ValueError


def open_access() -> Access:
    """To a service without TLS that asks for no token."""
    return Access()


def read_token(file: Path | str) -> str:
    """The token in a file. Raises OSError, and ValueError naming the file as `checked_token` does."""
    return checked_token(Path(file).read_text(errors="replace"), f"token-file: {file}")


def checked_token(text: str, source: str) -> str:
    """A text without the white space around it, which is not part of a token: secrets often end with a line feed. Raises ValueError
    naming the source of a blank one and of one that no header can carry."""
    token = text.strip()
    if not token:
        raise ValueError(f"{source} is empty")
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"{source}: a token has printable ASCII characters alone")
    return token
