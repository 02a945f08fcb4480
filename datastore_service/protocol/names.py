"""Names that a client chooses, in the form in which they are sent to a datastore."""

from __future__ import annotations

import hashlib

MAX_NAME_BYTES = 256
DIGEST = "sha256:"


def bounded_name(name: str) -> str:
    """The name itself where a datastore takes it, else its digest: an empty one, one of more than MAX_NAME_BYTES bytes of UTF-8, or one
    that is not Unicode (JSON can hold half of a surrogate pair). A name that looks like a digest is digested too, so that nobody can
    choose another's."""
    try:
        if 0 < len(name.encode()) <= MAX_NAME_BYTES and not name.startswith(DIGEST):
            return name
    except UnicodeEncodeError:
        pass  # the digest takes any string
    return DIGEST + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()


def of_tenant(tenant: str, name: str) -> str:
    """What a client has named, as a name of its tenant's alone. The length keeps a client from writing another tenant's."""
    return f"{len(tenant)}:{tenant}:{name}"


def hashed_name(tenant: str, name: str) -> str:
    """What a client calls its session or its user, as a datastore is told of it: names can tell of persons."""
    return hashlib.sha256(of_tenant(tenant, name).encode(errors="surrogatepass")).hexdigest()
