"""Bounds of an engine's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from datastore_service.engine.groups import MOST_BYTES as GROUP_BYTES
from datastore_service.engine.live.merge_policy import MOST_FRESH_TOKENS
from datastore_service.engine.session import MAX_TOKENS
from datastore_service.engine.workspaces import LEAST_TOKENS

# Bytes at most: a session with its last draft and a conversation, beside their tokens; a token of these, of the live tier sorted
# and not yet sorted, and one that was refused.
_SESSION, _SESSION_TOKEN, LIVE_TOKEN, _FRESH_TOKEN, _REFUSED = 10_240, 90, 6, 120, 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one namespace's memory. An entry that would exceed one of the first three is answered OVER_BUDGET.

    sessions: open at a time. session_tokens: of each. tokens: of open sessions and kept conversations; conversations
    leave to make room for sessions. live_tokens: of closed sessions' outputs and warmed-up documents, of which the oldest
    leave; 0 keeps none. live_seconds: that a document stays there at most. workspace_tokens: of all workspaces, of which the oldest text leaves; 0 keeps none. refusals: refused tokens kept of each session; 0 means no rejected tier, because it gains nothing
    measurable (docs/optimisations.md)."""

    sessions: int = 4096
    session_tokens: int = 1 << 20
    tokens: int = 1 << 26
    live_tokens: int = 1 << 24
    conversations: int = 4096
    conversation_bytes: int = 1 << 30
    conversation_seconds: float = 3600.0
    live_seconds: float = math.inf
    refusals: int = 0
    workspace_tokens: int = 0

    @property
    def most_bytes(self) -> int:
        """The memory that this permits, without the prior's, which is the page cache's."""
        sessions = (self.sessions + self.conversations) * _SESSION + self.tokens * _SESSION_TOKEN
        refused = self.sessions * self.refusals * _REFUSED
        fresh = MOST_FRESH_TOKENS * _FRESH_TOKEN if self.live_tokens else 0
        workspaces = self.workspace_tokens * _FRESH_TOKEN
        return sessions + refused + self.live_tokens * LIVE_TOKEN + fresh + workspaces + GROUP_BYTES

    def __post_init__(self) -> None:
        for name in ("sessions", "session_tokens", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.session_tokens > MAX_TOKENS:
            raise ValueError(f"session_tokens: {self.session_tokens} exceeds {MAX_TOKENS}")
        for name in (
            "live_tokens",
            "conversations",
            "conversation_bytes",
            "conversation_seconds",
            "live_seconds",
            "refusals",
        ):
            if not getattr(self, name) >= 0:  # NaN too
                raise ValueError(f"{name}: {getattr(self, name)} is not at least 0")
        if self.workspace_tokens and self.workspace_tokens < LEAST_TOKENS:
            raise ValueError(
                f"workspace_tokens: {self.workspace_tokens} is neither 0 nor at least {LEAST_TOKENS}"
            )
