"""Every method by the name it has in tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from benchmarks.replay.method import Method
from benchmarks.replay.ours import Ours, Tiers, prior_of
from benchmarks.replay.prompt_lookup import PromptLookup
from benchmarks.replay.rest import Rest
from benchmarks.replay.sglang_ngram import SglangNgram
from benchmarks.replay.suffix_decoding import SuffixDecoding, installed
from benchmarks.report.replaying import OURS
from datastore_service.engine.fusion import Policy
from datastore_service.engine.segment import Segment


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
    f"{OURS}, prior alone": _ours(Tiers(session=False, live=False)),
    f"{OURS}, with rejected": _ours(Tiers(rejected=True)),
    f"{OURS}, priority fusion": _ours(policy=Policy.PRIORITY),
}
PEERS: dict[str, Factory] = {
    "prompt lookup": lambda corpus, nodes: PromptLookup(nodes),
    "REST-style": lambda corpus, nodes: Rest(corpus.segments, nodes),
    "SGLang trie": lambda corpus, nodes: SglangNgram(nodes),
    "SGLang trie, by frequency": lambda corpus, nodes: SglangNgram(nodes, match="PROB"),
    "SGLang trie + corpus": lambda corpus, nodes: SglangNgram(nodes, automaton=corpus.documents),
    "SGLang trie, warmed": lambda corpus, nodes: SglangNgram(nodes, warm=corpus.documents),
    "suffix decoding": lambda corpus, nodes: SuffixDecoding(corpus.documents, nodes, tree=False),
    "suffix decoding, tree": lambda corpus, nodes: SuffixDecoding(corpus.documents, nodes, tree=True),
}
METHODS = OWN | PEERS
NEEDS_PEERS = tuple(name for name in PEERS if name.startswith("suffix decoding"))


def available() -> list[str]:
    """The methods that can run here."""
    return [name for name in METHODS if installed() or name not in NEEDS_PEERS]
