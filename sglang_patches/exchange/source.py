"""Who proposed a node, as a DraftTree's `sources` say it: the datastore's tiers, and a draft model."""

from datastore_service.protocol.tree import OTHER_TIER, Tier, tier_name

DRAFT_MODEL = OTHER_TIER + 1
SOURCES = DRAFT_MODEL + 1  # numbers are below it
assert max(Tier) < OTHER_TIER


def source_name(source: int) -> str:
    """The name of a source, as metrics and answers show it."""
    return "draft_model" if source == DRAFT_MODEL else tier_name(source)
