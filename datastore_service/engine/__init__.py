"""The datastore's engine: tokens in, draft trees out."""

import hashlib
from pathlib import Path


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted([*here.rglob("*.py"), *(here.parent / "protocol").glob("*.py")]):
        digest.update(
            path.relative_to(here.parent).as_posix().encode()
            + b"\0"
            + hashlib.sha256(path.read_bytes()).digest()
        )
    return digest.hexdigest()[:16]


# Computed before any other module of the package is read. If a file is replaced during the import, kernels of the new
# file get the old digest, so the complete new version never takes them for its own.
SOURCES_DIGEST = _digest_of_sources()
