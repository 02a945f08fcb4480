"""Workspaces are texts that the sessions of one project share, their prompts included.

A session that names a workspace adds its text when it ends, and searches what others have added. Agents send the same beginning again
in each request, so a text is compared block by block with what was added before, as prefix caches do, and only what follows the known
blocks is added. A text without a new block adds nothing.

A workspace is some `FreshText`s. All workspaces of an engine together have at most TEXTS of them, each of a TEXTS-th of the
budget; for one more the oldest leaves, whosever it is. What it has of whom is not noted, so all of them are emptied to forget anybody.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from datastore_service.engine.live.view import FreshText
from datastore_service.engine.provenance import provenance_of
from datastore_service.engine.session import LONGEST_GRAM
from datastore_service.protocol.types import Opening

TEXTS = 32
BLOCK = 64  # tokens
LEAST_TOKENS = TEXTS * 4 * BLOCK  # of a budget that is not 0: a text has room for some blocks


@dataclass(slots=True, eq=False)
class _Part:
    """A text of a workspace. blocks: digests of the blocks that it has, each of a block and all before it."""

    workspace: str
    text: FreshText
    blocks: set[bytes] = field(default_factory=set)


class Workspaces:
    """Every method may be called from any thread; `texts` waits for no other.

    limit: tokens of all workspaces; 0 keeps none.
    changed: called when `texts` gives something else than before. Called under a lock that `texts` does not take."""

    def __init__(self, limit: int, changed: Callable[[], None]) -> None:
        self.limit = limit
        self._capacity = limit // TEXTS
        self._changed = changed
        self._lock = threading.Lock()
        self._parts: list[_Part] = []  # oldest first
        self._texts: dict[str, tuple[FreshText, ...]] = {}  # by workspace, newest first

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, name: str) -> bool:
        return name in self._texts

    @property
    def tokens(self) -> int:
        return sum(len(part.text) for part in list(self._parts))

    @property
    def nbytes(self) -> int:
        return sum(part.text.nbytes for part in list(self._parts))

    def texts(self, name: str) -> tuple[FreshText, ...]:
        """What a session of the workspace searches, newest first."""
        return self._texts.get(name, ())

    def add(self, name: str, text: np.ndarray) -> None:
        """Adds what is new of a session's text, int32."""
        if not self._capacity:
            return
        digests = _chained_digests(text)
        with self._lock:
            blocks = [part.blocks for part in self._parts if part.workspace == name]
            known = sum(1 for _ in takewhile(lambda digest: any(digest in held for held in blocks), digests))
            self._write(name, text, digests, known)

    def forget(self, name: str) -> None:
        """Forgets a workspace; an unknown name is no error."""
        with self._lock:
            self._keep([part for part in self._parts if part.workspace != name])

    def expire(self, before: float) -> None:
        """Forgets the texts that began before a time, in seconds since 1970, with all that they have."""
        if any(part.text.oldest < before for part in self._parts):
            with self._lock:
                self._keep([part for part in self._parts if part.text.oldest >= before])

    def clear(self) -> None:
        with self._lock:
            self._keep([])

    def _write(self, name: str, text: np.ndarray, digests: Sequence[bytes], known: int) -> None:
        """Writes what follows the first `known` blocks, in pieces that fit a text. Each begins with the tokens before it that n-grams need."""
        step = (self._capacity - LONGEST_GRAM - BLOCK) // BLOCK
        for first in range(known, len(digests), step):
            last = min(first + step, len(digests))
            end = len(text) if last == len(digests) else last * BLOCK
            piece = text[max(0, first * BLOCK - LONGEST_GRAM) : end]
            part = self._part_for(name, len(piece) + 1)
            part.text.add(piece, provenance_of(Opening(), time.time()))
            part.blocks.update(digests[first:last])

    def _part_for(self, name: str, size: int) -> _Part:
        """The workspace's newest text if it has room for so many tokens, else a new one."""
        newest = next((part for part in reversed(self._parts) if part.workspace == name), None)
        if newest is not None and newest.text.has_room(size):
            return newest
        part = _Part(name, FreshText(0, self._capacity))
        self._keep([*self._parts, part][-TEXTS:])
        return part

    def _keep(self, parts: list[_Part]) -> None:
        """Keeps these texts and no others. Called under the lock."""
        self._parts = parts
        texts: dict[str, tuple[FreshText, ...]] = {}
        for part in parts:
            texts[part.workspace] = (part.text, *texts.get(part.workspace, ()))
        self._texts = texts
        self._changed()


def _chained_digests(text: np.ndarray) -> list[bytes]:
    """Digests of the text's whole blocks, each of a block and all before it."""
    digests, chained = [], hashlib.blake2b(digest_size=16)
    for end in range(BLOCK, len(text) + 1, BLOCK):
        chained.update(text[end - BLOCK : end].tobytes())
        digests.append(chained.digest())
    return digests
