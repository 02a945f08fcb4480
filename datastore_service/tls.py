"""TLS files of a service and of its clients. They are checked before anything listens or connects, because gRPC would
only report a failed handshake."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)
File = Path | str | None

SOON = timedelta(days=14)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of one side. certificate, key: its own, None for a client without. ca: the authority that it trusts, None
    for a service that asks for no certificate. ends: when the first of the own certificates does."""

    certificate: bytes | None
    key: bytes | None
    ca: bytes | None
    ends: datetime | None = None

    def ends_soon(self, now: datetime) -> bool:
        """Whether the own certificate has ended or is about to."""
        return self.ends is not None and self.ends - now < SOON


def warn_of_end(what: str, tls: Tls) -> None:
    """Logs a warning if the own certificate has ended or is about to.

    what: the certificate, in words."""
    if tls.ends_soon(datetime.now(UTC)):
        log.warning(
            "%s ends soon: put a renewed one and its key in its place", what, extra={"ends": tls.ends}
        )


def server_tls(certificate: File, key: File, client_ca: File = None) -> Tls | None:
    """A service's side; None if no file is given. client_ca: clients must show a certificate that it has signed.

    Raises ValueError naming the option of a missing, unreadable or unsuitable file."""
    if client_ca and not certificate:
        raise ValueError("tls-client-ca: needs tls-certificate and tls-key")
    if not (pair := _pair(certificate, key)):
        return None
    return replace(pair, ca=_authority("tls-client-ca", client_ca))


def client_tls(ca: File, certificate: File = None, key: File = None) -> Tls | None:
    """A client's side; None if no file is given. ca: has signed the service's certificate. certificate, key: shown to a
    service that asks for them.

    Raises ValueError naming the option of a missing, unreadable or unsuitable file."""
    if (certificate or key) and not ca:
        raise ValueError(f"tls-{'certificate' if certificate else 'key'}: needs tls-ca")
    return client_files("tls", ca, certificate, key) if ca else None


def client_files(options: str, ca: File, certificate: File, key: File) -> Tls:
    """A client's files, as the options of these names give them; without `ca` it trusts the system's authorities.

    Raises ValueError naming the option of a missing, unreadable or unsuitable file. options: how the options' names begin."""
    pair = _pair(certificate, key, options) or Tls(None, None, None)
    return replace(pair, ca=_authority(f"{options}-ca", ca))


def _pair(certificate: File, key: File, options: str = "tls") -> Tls | None:
    if not certificate and not key:
        return None
    if not certificate or not key:
        given, missing = ("certificate", "key") if certificate else ("key", "certificate")
        raise ValueError(f"{options}-{given}: needs {options}-{missing}")
    pem, chain = _certificates(f"{options}-certificate", certificate)
    if fault := next(_out_of_date(chain), None):
        raise ValueError(f"{options}-certificate: {certificate}: {fault}")
    key_pem = _read(f"{options}-key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            certificate, key, password=lambda: b""
        )  # a key with a passphrase fails and does not prompt
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        why = f"not the key of {certificate}" if mismatch else "not a PEM private key without a passphrase"
        raise ValueError(f"{options}-key: {key}: {why}") from None
    except OSError as error:  # one of the files is gone since it was read
        raise ValueError(f"{options}-key: {key}: {error.strerror}") from None
    return Tls(pem, key_pem, None, min(each.not_valid_after_utc for each in chain))


def _authority(option: str, path: File) -> bytes | None:
    """One that has ended may stand beside its successor."""
    if not path:
        return None
    pem, trusted = _certificates(option, path)
    faults = list(_out_of_date(trusted))
    if len(faults) == len(trusted):
        raise ValueError(f"{option}: {path}: {faults[-1]}")
    return pem


def _certificates(option: str, path: Path | str) -> tuple[bytes, list[Certificate]]:
    from cryptography.x509 import load_pem_x509_certificates

    pem = _read(option, path)
    try:
        return pem, load_pem_x509_certificates(pem)
    except ValueError:
        raise ValueError(f"{option}: {path}: no PEM certificate in it") from None


def _out_of_date(certificates: Iterable[Certificate]) -> Iterator[str]:
    """The fault of each that is not valid now. A peer would refuse it in the handshake."""
    now = datetime.now(UTC)
    for certificate in certificates:
        if now > (end := certificate.not_valid_after_utc):
            yield f"a certificate in it ended on {end:%Y-%m-%d %H:%M} UTC"
        elif now < (begin := certificate.not_valid_before_utc):
            yield f"a certificate in it begins on {begin:%Y-%m-%d %H:%M} UTC"


def _read(option: str, path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{option}: {path}: {error.strerror}") from None
