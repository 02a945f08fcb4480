"""TLS files of a service and of its clients. They are checked before anything listens or connects, because gRPC would
only report a failed handshake."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

File = Path | str | None


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of one side. certificate, key: its own, None for a client without. ca: the authority that it trusts, None
    for a service that asks for no certificate."""

    certificate: bytes | None
    key: bytes | None
    ca: bytes | None


def server_tls(certificate: File, key: File, client_ca: File = None) -> Tls | None:
    """A service's side; None if no file is given. client_ca: clients must show a certificate that it has signed.

    Raises ValueError naming the option of a missing, unreadable or unsuitable file."""
    if client_ca and not certificate:
        raise ValueError("tls-client-ca: needs tls-certificate and tls-key")
    certificate_pem, key_pem = _pair(certificate, key)
    return Tls(certificate_pem, key_pem, _authority("tls-client-ca", client_ca)) if certificate else None


def client_tls(ca: File, certificate: File = None, key: File = None) -> Tls | None:
    """A client's side; None if no file is given. ca: has signed the service's certificate. certificate, key: shown to a
    service that asks for them.

    Raises ValueError naming the option of a missing, unreadable or unsuitable file."""
    if (certificate or key) and not ca:
        raise ValueError(f"tls-{'certificate' if certificate else 'key'}: needs tls-ca")
    certificate_pem, key_pem = _pair(certificate, key)
    return Tls(certificate_pem, key_pem, _authority("tls-ca", ca)) if ca else None


def _pair(certificate: File, key: File) -> tuple[bytes | None, bytes | None]:
    if not certificate and not key:
        return None, None
    if not certificate or not key:
        given, missing = ("certificate", "key") if certificate else ("key", "certificate")
        raise ValueError(f"tls-{given}: needs tls-{missing}")
    certificate_pem = _certificates("tls-certificate", certificate)
    key_pem = _read("tls-key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            certificate, key, password=lambda: b""
        )  # a key with a passphrase fails and does not prompt
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        why = f"not the key of {certificate}" if mismatch else "not a PEM private key without a passphrase"
        raise ValueError(f"tls-key: {key}: {why}") from None
    return certificate_pem, key_pem


def _authority(option: str, path: File) -> bytes | None:
    return _certificates(option, path) if path else None


def _certificates(option: str, path: Path | str) -> bytes:
    pem = _read(option, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        raise ValueError(f"{option}: {path}: no PEM certificate in it") from None
    return pem


def _read(option: str, path: Path | str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{option}: {path}: {error.strerror}") from None
