"""Counts what the target verified, by who proposed it."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from prometheus_client import Counter

from sglang_patches.ledger.outcome import Outcome
from sglang_patches.ledger.usage import SOURCES, source_name

VERIFIED = Counter(
    "specstore_verified_nodes",
    "Drafted tokens that the target verified, by who drafted them: draft_model, head, reference, or a tier of the datastore",
    ["source"],
)
ACCEPTED = Counter(
    "specstore_accepted_nodes", "Drafted tokens that the target accepted, by who drafted them", ["source"]
)
_total = 0


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
