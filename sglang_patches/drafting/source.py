"""Who proposed a node, as a DraftTree's `sources` say it: the datastore's tiers, and a draft model."""

from datastore_service.protocol.tree import Tier

DRAFT_MODEL = 16
SOURCES = DRAFT_MODEL + 1  # numbers are below it
assert max(Tier) < DRAFT_MODEL


def source_name(source: int) -> str:
    """As metrics and answers show it."""
    return "draft_model" if source == DRAFT_MODEL else Tier(source).name.lower()
