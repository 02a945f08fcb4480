"""The certificate that a service shows, replaced while it serves: connections that are open keep the one that they began with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import grpc

from datastore_service.server.reloading import Files, Reloading
from datastore_service.tls import Tls, server_tls


def watched_tls(
    certificate: Path | None, key: Path | None, client_ca: Path | None = None
) -> Reloading[Tls] | None:
    """What `server_tls` makes of the files, with their changes; None if none is given. Raises ValueError as that does."""
    given = [path for path in (certificate, key, client_ca) if path]
    return Reloading("tls-certificate", partial(_read, given, certificate, key, client_ca)) if given else None


def server_credentials(tls: Reloading[Tls]) -> grpc.ServerCredentials:
    """Credentials that show each new connection the certificate in force."""
    shown = tls.value

    def replaced() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if (now := tls.value) is shown:
            return None
        shown = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), replaced, shown.ca is not None)


def _read(
    given: Sequence[Path], certificate: Path | None, key: Path | None, client_ca: Path | None, files: Files
) -> Tls:
    for path in given:
        files.note(path)
    tls = server_tls(certificate, key, client_ca)
    assert tls is not None  # some file is given
    return tls


def _configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.ca)
