"""This project's engine, all of it or some of its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.replay.method import Method
from datastore_service.engine.engine import Engine
from datastore_service.engine.fusion import CLASSES, FusionWeights, Policy
from datastore_service.engine.limits import Limits
from datastore_service.engine.segment import Segment, build_segment
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget, Entry, Opening, Rejected
from sglang_patches.ledger.outcome import settle

REFUSALS = 4096
NAME = "replay"


@dataclass(frozen=True)
class Tiers:
    """Those that take part."""

    session: bool = True
    live: bool = True
    prior: bool = True
    rejected: bool = False


def prior_of(documents: Sequence[np.ndarray], vocab_size: int) -> list[Segment]:
    return [build_segment(documents, vocab_size)] if documents else []


class Ours(Method):
    """Drafts as SSSD's worker does: each step sends what was accepted since the last one, and gets a tree back."""

    def __init__(
        self,
        prior: Sequence[Segment],
        vocab_size: int,
        nodes: int,
        tiers: Tiers | None = None,
        weights: FusionWeights | None = None,
        policy: Policy = Policy.WEIGHTED,
    ) -> None:
        self._tiers = tiers or Tiers()
        weights = replace(weights or FusionWeights(), policy=policy)
        if not self._tiers.session:
            weights = replace(weights, trust_session=(0.0,) * CLASSES)
        self._budget = Budget(nodes)
        self._engine = Engine(
            vocab_size,
            prior if self._tiers.prior else (),
            weights,
            Limits(refusals=REFUSALS if self._tiers.rejected else 0),
        )
        self._sent = 0
        self._refused: tuple[Rejected, ...] = ()

    def begin(self, prompt: np.ndarray) -> None:
        opening = Opening(publish=self._tiers.live, prompt_length=len(prompt))
        self._engine.step([Entry(NAME, 0, prompt, opening=opening)])
        self._sent, self._refused = len(prompt), ()

    def draft(self, text: np.ndarray) -> DraftTree:
        entry = Entry(NAME, self._sent, text[self._sent :], self._refused, self._budget)
        (reply,) = self._engine.step([entry])
        self._sent = len(text)
        return reply.tree

    def verified(self, tree: DraftTree, known: int, accepted: np.ndarray) -> None:
        if self._tiers.rejected:
            (outcome,) = settle([None], [tree], [known], [tree.tokens[accepted]])
            self._refused = outcome.refused

    def end(self, text: np.ndarray) -> None:
        self._engine.step([Entry(NAME, self._sent, text[self._sent :], closing=True)])
