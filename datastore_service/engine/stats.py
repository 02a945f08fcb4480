"""What an engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from datastore_service.protocol.tree import Tier


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier holds, and what its drafts were worth.

    segments: 0 for a tier without segments.
    hits: drafts with at least one node of the tier.
    drafted: the tier's nodes.
    accepted: its nodes on the path that the session's text took through its last draft, whether the worker verified them or not.
    damaged: segments that were taken out; the other figures do not count them.
    """

    tokens: int = 0
    nbytes: int = 0
    segments: int = 0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """An open session. tokens: prompt, output and the conversation before them. nbytes: memory of its index."""

    name: str
    tokens: int
    prompt_length: int
    nbytes: int
    conversation: str
    publish: bool


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The sizes and counters of an engine.

    drafts: trees asked for since the start, empty ones included.
    merge_failures: merges of the live tier that failed.
    tiers: SESSION counts conversations too.
    log_bytes: bytes of the live tier's logs.
    log_unsynced_bytes: how many of them a power failure would take.
    log_failures: outputs that could not be logged, and failed syncs.
    unknown_priors: names of priors that sessions have given and that they may not read, or that there are not.
    workspaces, workspace_tokens, workspace_bytes: how many there are, and what they hold.
    groups, group_bytes: how many have text, and what it takes.
    epoch: of the weights."""

    sessions: int
    conversations: int
    drafts: int
    merge_failures: int
    tiers: dict[Tier, TierStats]
    log_bytes: int = 0
    log_unsynced_bytes: int = 0
    log_failures: int = 0
    unknown_priors: int = 0
    workspaces: int = 0
    workspace_tokens: int = 0
    workspace_bytes: int = 0
    groups: int = 0
    group_bytes: int = 0
    epoch: int = 0
