"""What the engines of one tenant share: an engine asks before it opens a session or adds text to its live tier."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class NoRoomError(Exception):
    """There is no room for a session or a text. The message names the field, its limit, and whose limit it is."""


class Share(Protocol):
    """An engine's part of what its tenant may take. Any thread may call it, under any lock of an engine."""

    def open_session(self) -> None:
        """Counts a session. Raises NoRoomError, and then has not counted it."""
        ...

    def may_open_session(self) -> bool:
        """Whether `open_session` would count one. Counts no refusal."""
        ...

    def end_sessions(self, count: int) -> None:
        """Counts sessions of `open_session` no longer."""
        ...

    def adding(self, tokens: int, outputs: int = 0) -> AbstractContextManager[None]:
        """Surrounds the addition of text to the live tier. Entering it raises NoRoomError.

        outputs: how many sessions have ended with this text."""
        ...


class Unshared:
    """The share of an engine that its own limits alone bound."""

    def open_session(self) -> None:
        pass

    def may_open_session(self) -> bool:
        return True

    def end_sessions(self, count: int) -> None:
        pass

    def adding(self, tokens: int, outputs: int = 0) -> AbstractContextManager[None]:
        return nullcontext()
