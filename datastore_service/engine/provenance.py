"""The provenance of a document of the live tier: whose text it is, since when there is such text, and where it was published. By that
it is forgotten, and by that services that share it know which texts they have.

Names are kept as 64-bit digests: a segment has as many provenances as documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from datastore_service.protocol.types import Opening

# Digests of names, 0 for none; seconds since 1970.
NAMED = [("conversation", "<u8"), ("user", "<u8"), ("published", "<u8")]
# The service that published it, 0 for this one; its number among the outputs of that service, 0 for text that is no output.
PROVENANCE = np.dtype([*NAMED, ("origin", "<u8"), ("number", "<u8")])
UNNUMBERED = np.dtype(NAMED)  # as files had it before
NO_PROVENANCE = np.empty(0, PROVENANCE)
KINDS = ("conversation", "user")

# Which documents are meant: bool [documents] of PROVENANCE [documents].
Selection = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Subject:
    """A conversation or a user, whose text can be forgotten. kind: one of KINDS. digest: of its name."""

    kind: str
    digest: int

    @staticmethod
    def named(kind: str, name: str) -> Subject:
        return Subject(kind, digest(name))

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest:016x}"

    @staticmethod
    def parse(text: str) -> Subject:
        """The subject that `str` has written. Raises ValueError."""
        kind, _, digits = text.partition(":")
        if kind not in KINDS or len(digits) != 16:
            raise ValueError(f"{text!r} is no subject")
        return Subject(kind, int(digits, 16))


def digest(name: str) -> int:
    """The name in 64 bits; 0 for no name."""
    data = name.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") if name else 0


def subjects_of(opening: Opening) -> frozenset[Subject]:
    """Those that a session's text belongs to."""
    named = {kind: getattr(opening, kind) for kind in KINDS}
    return frozenset(Subject.named(kind, name) for kind, name in named.items() if name)


def provenance_of(opening: Opening, published: float, documents: int = 1) -> np.ndarray:
    """PROVENANCE [documents], of documents that a session has written. published: seconds since 1970."""
    row = digest(opening.conversation), digest(opening.user), int(published), 0, 0
    return np.array([row] * documents, PROVENANCE)


def unnumbered(data: bytes) -> np.ndarray:
    """PROVENANCE of documents whose file has UNNUMBERED. data: the file's bytes."""
    earlier = np.frombuffer(data, UNNUMBERED)
    provenance = np.zeros(len(earlier), PROVENANCE)
    for name, _ in NAMED:
        provenance[name] = earlier[name]
    return provenance


def belonging_to(subjects: Collection[Subject]) -> Selection:
    """Selects the documents of any of the subjects."""
    named = {kind: {subject.digest for subject in subjects if subject.kind == kind} - {0} for kind in KINDS}
    digests = {kind: np.array(sorted(named[kind]), np.uint64) for kind in KINDS}
    return lambda provenance: np.logical_or(*(np.isin(provenance[kind], digests[kind]) for kind in KINDS))


def published_before(seconds: float) -> Selection:
    """Selects the documents that are older."""
    return lambda provenance: provenance["published"] < seconds
