"""Certificates made for one test."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True, slots=True)
class Files:
    ca: Path
    certificate: Path
    key: Path


def issue(
    folder: Path,
    authority: trustme.CA,
    name: str,
    begins: datetime | None = None,
    ends: datetime | None = None,
) -> Files:
    """A certificate for a service on 127.0.0.1 (or a client of it), with its key and who signed it. It is valid now unless
    `begins` and `ends` say otherwise."""
    folder.mkdir(exist_ok=True)
    files = Files(folder / f"{name}-ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
    issued = authority.issue_cert("127.0.0.1", "localhost", not_before=begins, not_after=ends)
    authority.cert_pem.write_to_path(files.ca)
    issued.cert_chain_pems[0].write_to_path(files.certificate)
    issued.private_key_pem.write_to_path(files.key)
    return files


def issue_named(folder: Path, authority: trustme.CA, name: str, uri: str) -> Files:
    """A client's certificate with a URI for its name, which trustme does not make."""
    folder.mkdir(exist_ok=True)
    files = Files(folder / f"{name}-ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes()).subject
    signs = serialization.load_pem_private_key(authority.private_key_pem.bytes(), None)
    assert isinstance(signs, ec.EllipticCurvePrivateKey)
    issued = (
        x509.CertificateBuilder(issuer, x509.Name([]), key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True)
        .sign(signs, hashes.SHA256())
    )
    authority.cert_pem.write_to_path(files.ca)
    files.certificate.write_bytes(issued.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    files.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    )
    return files
