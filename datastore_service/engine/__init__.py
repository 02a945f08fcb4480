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


# Taken here, before any other module of the package is read: were a file replaced during the import, the digest is the
# old one, and what is compiled from the new file is never taken for what the complete new version compiles to.
SOURCES = _digest_of_sources()
