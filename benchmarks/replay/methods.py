"""Every method by the name it has in tables and plots, and this project's engine as one, all of it or some of its tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from benchmarks.replay.method import Method
from benchmarks.replay.peers import SglangNgram, SuffixDecoding, installed
from benchmarks.replay.retrieval import PromptLookup, Rest
from benchmarks.replay.sssd import Sssd
from benchmarks.replay.tables import OURS
from datastore_service.engine.engine import Engine
from datastore_service.engine.fusion import CLASSES, FusionWeights, Policy
from datastore_service.engine.limits import Limits
from datastore_service.engine.segment import Segment, build_segment
from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import Budget, Entry, Opening, Rejected
from sglang_patches.ledger.outcome import settle

REFUSALS = 4096
SSSD_PREFIXES = (4, 32)  # the paper's, and the best that was tried
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
        policy: Policy = Policy.WEIGHTED,
    ) -> None:
        self._tiers, self._budget = tiers or Tiers(), Budget(nodes)
        weights = FusionWeights(policy=policy)
        if not self._tiers.session:
            weights = replace(weights, trust_session=(0.0,) * CLASSES)
        limits = Limits(refusals=REFUSALS if self._tiers.rejected else 0)
        self._engine = Engine(vocab_size, prior if self._tiers.prior else (), weights, limits)
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


@dataclass(frozen=True)
class Corpus:
    """The documents a method may know before the first request."""

    documents: Sequence[np.ndarray]
    vocab_size: int = field(kw_only=True)

    @cached_property
    def segments(self) -> list[Segment]:
        return prior_of(self.documents, self.vocab_size)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.documents))


Factory = Callable[[Corpus, int], Method]  # of a number of nodes


def _ours(tiers: Tiers | None = None, policy: Policy = Policy.WEIGHTED) -> Factory:
    return lambda corpus, nodes: Ours(corpus.segments, corpus.vocab_size, nodes, tiers, policy=policy)


OWN: dict[str, Factory] = {
    OURS: _ours(),
    f"{OURS}, session alone": _ours(Tiers(live=False, prior=False)),
    f"{OURS}, live alone": _ours(Tiers(session=False, prior=False)),
    f"{OURS}, corpus alone": _ours(Tiers(session=False, live=False)),
    f"{OURS}, with rejected": _ours(Tiers(rejected=True)),
    f"{OURS}, priority fusion": _ours(policy=Policy.PRIORITY),
}


def _sssd(prefix: int) -> Factory:
    return lambda corpus, nodes: Sssd(corpus.segments, corpus.vocab_size, nodes, prefix)


# Written to be read beside the paper: so slow that it is replayed where it is asked for alone.
PAPER: dict[str, Factory] = {f"SSSD's paper, {prefix} tokens": _sssd(prefix) for prefix in SSSD_PREFIXES}
SUFFIX_TREE = "suffix decoding, tree"
PEERS: dict[str, Factory] = {
    "prompt lookup": lambda corpus, nodes: PromptLookup(nodes),
    "REST-style": lambda corpus, nodes: Rest(corpus.segments, nodes),
    "SGLang trie": lambda corpus, nodes: SglangNgram(nodes),
    "SGLang trie, by frequency": lambda corpus, nodes: SglangNgram(nodes, match="PROB"),
    "SGLang trie + corpus": lambda corpus, nodes: SglangNgram(nodes, automaton=corpus.documents),
    "SGLang trie, warmed": lambda corpus, nodes: SglangNgram(nodes, warm=corpus.documents),
    "suffix decoding": lambda corpus, nodes: SuffixDecoding(corpus.documents, nodes, tree=False),
    SUFFIX_TREE: lambda corpus, nodes: SuffixDecoding(corpus.documents, nodes, tree=True),
}
METHODS = OWN | PAPER | PEERS
NEEDS_PEERS = tuple(name for name in PEERS if name.startswith("suffix decoding"))


def available() -> list[str]:
    """The methods that can run here."""
    return [name for name in METHODS if installed() or name not in NEEDS_PEERS]
