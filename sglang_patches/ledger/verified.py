"""Counts what the target verified, by who proposed it: a DraftTree's `sources` name the datastore's tiers and a draft model."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from prometheus_client import Counter

from datastore_service.protocol.tree import OTHER_TIER, Tier, tier_name
from sglang_patches.ledger.outcome import Outcome

VERIFIED = Counter("specstore_verified_nodes", "Drafted tokens that the target verified", ["source"])
ACCEPTED = Counter("specstore_accepted_nodes", "Drafted tokens that the target accepted", ["source"])
_total = 0


DRAFT_MODEL = OTHER_TIER + 1
SOURCES = DRAFT_MODEL + 1  # numbers are below it


def count(outcomes: Iterable[Outcome]) -> None:
    """Counts the drafted tokens that steps verified and accepted, by source. Each step is to be given once."""
    global _total
    drafted = [outcome for outcome in outcomes if len(outcome.tree)]
    if not drafted:
        return
    sources = np.concatenate([outcome.tree.sources for outcome in drafted])
    _total += len(sources)
    accepted = np.concatenate([outcome.accepted for outcome in drafted])
    for counter, of in ((VERIFIED, sources), (ACCEPTED, sources[accepted])):
        numbers = np.bincount(of, minlength=SOURCES)
        for source in np.flatnonzero(numbers).tolist():
            _labelled(counter, source).inc(int(numbers[source]))


def total() -> int:
    """Drafted tokens that were verified in this process."""
    return _total


@functools.cache  # a label's look-up costs more than the count
def _labelled(counter: Counter, source: int) -> Counter:
    return counter.labels(source_name(source))


assert max(Tier) < OTHER_TIER


def source_name(source: int) -> str:
    """The name of a source, as metrics and answers show it."""
    return "draft_model" if source == DRAFT_MODEL else tier_name(source)
