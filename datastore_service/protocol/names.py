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
