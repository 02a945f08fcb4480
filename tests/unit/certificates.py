"""Certificates made for one test."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import trustme


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
