"""The messages of a stream: an output that a service has published, or subjects to forget. Whoever can write to the stream can write
anything, so each is checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from redis.typing import EncodableT, FieldT

from datastore_service.engine.limits import Limits
from datastore_service.engine.provenance import PROVENANCE, Subject

TEXT, FORGET = b"text", b"forget"  # a message has one field
MOST_SUBJECTS = 1024
_TOKEN = np.dtype("<u4")
MOST_TOKENS = Limits().session_tokens  # a session's, and an output is part of one

Fields = dict[FieldT, EncodableT]  # as the client sends them
Document = tuple[np.ndarray, np.ndarray]  # int32, and its PROVENANCE [1] with an origin


class RefusedError(Exception):
    """A message that is not believed. reason: one of few words. The message says more."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


def text_message(service: int, text: np.ndarray, provenance: np.ndarray) -> Fields:
    """An output of this service. text: int32. provenance: PROVENANCE [1], as the live tier has it."""
    named = provenance.copy()
    named["origin"] = service
    return {TEXT: named.tobytes() + text.astype(_TOKEN).tobytes()}


def forget_message(subjects: Collection[Subject]) -> Fields:
    return {FORGET: ",".join(sorted(map(str, subjects))).encode()}


def read_message(fields: Mapping[bytes, bytes], vocab_size: int, now: float) -> Document | frozenset[Subject]:
    """What a message says: an output, or subjects to forget. Raises RefusedError.

    now: seconds since 1970; no text is younger."""
    if list(fields) == [TEXT]:
        return _text(fields[TEXT], vocab_size, now)
    if list(fields) == [FORGET]:
        return _subjects(fields[FORGET])
    raise RefusedError("unknown", f"a message of the fields {sorted(fields)[:3]!r:.100}")


def provenance_in(fields: Mapping[bytes, bytes]) -> np.ndarray:
    """The provenance of an output, PROVENANCE [1]; [0] of any other message."""
    data = fields.get(TEXT, b"")[: PROVENANCE.itemsize]
    return np.frombuffer(data if len(data) == PROVENANCE.itemsize else b"", PROVENANCE)


def _text(data: bytes, vocab_size: int, now: float) -> Document:
    size, rest = divmod(len(data) - PROVENANCE.itemsize, _TOKEN.itemsize)
    if size < 1 or rest:
        raise RefusedError("malformed", f"a text of {len(data)} bytes")
    if size > MOST_TOKENS:
        raise RefusedError("tokens", f"a text of {size} tokens, {MOST_TOKENS} is the limit")
    provenance = np.frombuffer(data, PROVENANCE, count=1).copy()
    if not provenance["origin"][0] or not provenance["number"][0]:
        raise RefusedError("malformed", "a text without an origin or a number")
    provenance["published"] = min(int(provenance["published"][0]), int(now))
    tokens = np.frombuffer(data, _TOKEN, offset=PROVENANCE.itemsize)
    if (largest := int(tokens.max())) >= vocab_size:
        raise RefusedError("vocabulary", f"id {largest} is outside the vocabulary of {vocab_size}")
    return tokens.astype(np.int32), provenance


def _subjects(data: bytes) -> frozenset[Subject]:
    words = data.split(b",", MOST_SUBJECTS)
    if len(words) > MOST_SUBJECTS:
        raise RefusedError("subjects", f"more than {MOST_SUBJECTS} subjects")
    try:
        return frozenset(Subject.parse(word.decode()) for word in words)
    except ValueError:
        raise RefusedError("malformed", "subjects that are none") from None
