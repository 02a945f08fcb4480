"""The texts of open sessions, to be sent again to a service that has lost them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from datastore_service.protocol.types import Entry, Opening

_FIRST_CAPACITY = 1024


@dataclass(slots=True)
class _Text:
    opening: Opening
    tenant: str
    size: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.empty(_FIRST_CAPACITY, np.int32))

    def extend(self, start: int, tokens: np.ndarray) -> None:
        """Appends the new part of `tokens`. Ignores tokens after a gap, which the datastore reports."""
        new = tokens[max(0, self.size - start) :]
        end = self.size + len(new)
        if start > self.size or not len(new):
            return
        if end > len(self.tokens):
            self.tokens = np.concatenate([self.tokens[: self.size], np.empty(end, np.int32)])
        self.tokens[self.size : end] = new
        self.size = end


class TokenLog:
    """Takes 4 bytes a token, at most twice that while a text grows."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def apply(self, entry: Entry) -> None:
        """A text is kept until it is removed, after its closing entry too."""
        if entry.opening is not None and entry.session not in self._texts:
            self._texts[entry.session] = _Text(entry.opening, entry.tenant)
        text = self._texts.get(entry.session)
        if text is not None:
            text.extend(entry.start, entry.tokens)

    def remove(self, session: str) -> None:
        self._texts.pop(session, None)

    def opening(self, session: str) -> Opening | None:
        """The session's opening, None if it is not open here."""
        text = self._texts.get(session)
        return text.opening if text else None

    def missing(self, session: str, known: int) -> Entry | None:
        """The entry that sends a datastore all but the first `known` tokens; None if the session is not open here."""
        text = self._texts.get(session)
        if text is None:
            return None
        tokens = text.tokens[known : text.size].copy()
        opening = None if known else text.opening
        return Entry(session, start=known, tokens=tokens, opening=opening, tenant=text.tenant)
