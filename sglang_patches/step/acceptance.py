"""How often drafted nodes are accepted, learned for each tenant and source of drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import numpy as np

from datastore_service.protocol.tree import DraftTree
from sglang_patches.ledger import verified
from sglang_patches.ledger.outcome import Follower, Outcome
from sglang_patches.ledger.rates import RateTable, per_tenant
from sglang_patches.ledger.requests import RequestBook
from sglang_patches.ledger.usage import SOURCES

_BINS = 10
_BIN_WEIGHT = 20.0  # pseudo-observations behind the drafter's own estimate


class Acceptance:
    """Turns drafters' path probabilities into acceptance rates, from what was seen: a table per tenant, by source and bin of probability.
    What one tenant's texts teach says nothing of another's, and tells nothing of them."""

    def __init__(self) -> None:
        self._tables: WeakSet[RateTable] = WeakSet()
        self._of = per_tenant(self._made)

    def estimate(self, trees: Sequence[DraftTree], tenants: Sequence[str]) -> np.ndarray:
        """float64, all trees' nodes one after the other: estimated chance that each is on the accepted path.

        tenants: whose each tree is.
        """
        if len(set(tenants)) > 1:
            parts = [
                self._of(tenant).rates(_cells(tree.probs, tree.sources))
                for tree, tenant in zip(trees, tenants, strict=True)
            ]
            return np.concatenate(parts)
        probs = np.concatenate([tree.probs for tree in trees])
        return self._of(tenants[0]).rates(_cells(probs, np.concatenate([tree.sources for tree in trees])))

    def observe(self, tenant: str, trees: Sequence[DraftTree], accepted: np.ndarray) -> None:
        """Learns which verified nodes were accepted.

        accepted: bool, all trees' nodes one after the other: whether each was on the accepted path.
        """
        probs = np.concatenate([tree.probs for tree in trees])
        self._of(tenant).learn(_cells(probs, np.concatenate([tree.sources for tree in trees])), accepted)

    def weights_changed(self) -> None:
        """The target says other things from now on, and older text may be right no more. Where that is so, it is found out in a few steps
        and not in as many as taught that it was right: what was learned counts no more than the drafters' own estimates did at first."""
        for table in self._tables:
            table.doubt(_BIN_WEIGHT)

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Learns from the steps that verified a tree."""
        drafted: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if len(outcome.tree):
                drafted[outcome.request.tenant].append(outcome)
        for tenant, of_tenant in drafted.items():
            accepted = np.concatenate([outcome.accepted for outcome in of_tenant])
            self.observe(tenant, [outcome.tree for outcome in of_tenant], accepted)

    def _made(self) -> RateTable:
        """A table that believes the drafters' own estimates."""
        centres = (np.arange(_BINS) + 0.5) / _BINS
        table = RateTable(np.tile(centres, (SOURCES, 1)), _BIN_WEIGHT)
        self._tables.add(table)
        return table


def _cells(probs: np.ndarray, sources: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cells of nodes in a tenant's table."""
    return sources, np.clip((probs * _BINS).astype(np.int64), 0, _BINS - 1)


class Learning(Follower):
    """Keeps outcomes until a step has been launched, then counts them and learns which drafts are accepted."""

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance
        self._outcomes: list[Outcome] = []  # not learned from
        self._counted = 0  # of these

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        self._outcomes += outcomes

    def count(self) -> None:
        """Counts what is not counted yet, for the server and for each request's answer."""
        news = self._outcomes[self._counted :]
        self._counted = len(self._outcomes)
        verified.count(news)
        for outcome in news:
            outcome.request.usage.add(outcome)

    def learn(self, running: RequestBook) -> None:
        """Counts, and learns what running requests accept."""
        self.count()
        self._acceptance.learn(outcome for outcome in self._outcomes if outcome.request in running)
        self._outcomes.clear()
        self._counted = 0
