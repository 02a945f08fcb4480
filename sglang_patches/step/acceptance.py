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


class AcceptanceModel:
    """Turns a drafter's path probabilities into acceptance rates, per source and probability bin, from what was seen."""

    def __init__(self) -> None:
        centres = (np.arange(_BINS) + 0.5) / _BINS
        self._rates = RateTable(np.tile(centres, (SOURCES, 1)), _BIN_WEIGHT)

    def estimate(self, probs: np.ndarray, sources: np.ndarray) -> np.ndarray:
        """float64 [nodes]: estimated chance that each node is on the accepted path. The arguments are a DraftTree's fields, or
        those of several one after the other."""
        return self._rates.rates((sources, self._bins(probs)))

    def observe(self, probs: np.ndarray, sources: np.ndarray, accepted: np.ndarray) -> None:
        """Learns which verified nodes were accepted.

        accepted: bool [nodes], which verified nodes were on the accepted path.
        """
        self._rates.learn((sources, self._bins(probs)), accepted)

    def doubt(self) -> None:
        """Has what was learned count no more than the drafter's own estimate did at first."""
        self._rates.doubt(_BIN_WEIGHT)

    @staticmethod
    def _bins(probs: np.ndarray) -> np.ndarray:
        return np.clip((probs * _BINS).astype(np.int64), 0, _BINS - 1)


class Acceptance:
    """A model a tenant: what one tenant's texts teach says nothing of another's, and tells nothing of them. of: the model of the
    tenant with that name."""

    def __init__(self) -> None:
        self._models: WeakSet[AcceptanceModel] = WeakSet()
        self.of = per_tenant(self._made)

    def weights_changed(self) -> None:
        """The target says other things from now on, and older text may be right no more. Where that is so, it is found out in a few steps
        and not in as many as taught that it was right."""
        for model in self._models:
            model.doubt()

    def _made(self) -> AcceptanceModel:
        model = AcceptanceModel()
        self._models.add(model)
        return model

    def estimate(self, trees: Sequence[DraftTree], tenants: Sequence[str]) -> np.ndarray:
        """float64, as `AcceptanceModel.estimate`, all trees' nodes one after the other. tenants: whose each tree is."""
        if len(set(tenants)) > 1:
            parts = [
                self.of(tenant).estimate(tree.probs, tree.sources)
                for tree, tenant in zip(trees, tenants, strict=True)
            ]
            return np.concatenate(parts)
        probs = np.concatenate([tree.probs for tree in trees])
        return self.of(tenants[0]).estimate(probs, np.concatenate([tree.sources for tree in trees]))

    def learn(self, outcomes: Iterable[Outcome]) -> None:
        """Learns from the steps that verified a tree."""
        drafted: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if len(outcome.tree):
                drafted[outcome.request.tenant].append(outcome)
        for tenant, of_tenant in drafted.items():
            self.of(tenant).observe(
                np.concatenate([outcome.tree.probs for outcome in of_tenant]),
                np.concatenate([outcome.tree.sources for outcome in of_tenant]),
                np.concatenate([outcome.accepted for outcome in of_tenant]),
            )


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
