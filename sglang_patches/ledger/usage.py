"""What one request's decoding took: steps, drafted and accepted tokens by who proposed them."""

from __future__ import annotations

import numpy as np

from datastore_service.protocol.tree import OTHER_TIER, DraftTree, Tier, tier_name
from sglang_patches.ledger.outcome import Outcome

# Who proposed a node, as a DraftTree's `sources` say it: the datastore's tiers, a draft model, the target's own head, and the request's
# own reference.
DRAFT_MODEL, HEAD, REFERENCE = OTHER_TIER + 1, OTHER_TIER + 2, OTHER_TIER + 3
SOURCES = REFERENCE + 1  # numbers are below it
_NAMES = {DRAFT_MODEL: "draft_model", HEAD: "head", REFERENCE: "reference"}
assert max(Tier) < OTHER_TIER
SUMMARY, PREDICTION = "specstore", "prediction"  # fields of an answer's `meta_info`, and of that
TARGET = "target"  # source of a token that nobody drafted
UNSETTLED = (
    2  # steps that an answer's end may lie in: overlap scheduling runs one step more than an answer needs
)


def source_name(source: int) -> str:
    """The name of a source, as metrics and answers show it."""
    return _NAMES.get(source) or tier_name(source)


class Usage:
    """Counts what one request's decoding took.

    Drafted tokens are the nodes that were verified. SGLang's `spec_num_proposed_drafts` counts the widest tree in each step instead. A
    step counts even if SGLang drops its result because it retracts the request.

    prompt: number of tokens.
    by_token: whether each output token's source is kept.
    predicted: whether the request brought a reference along.
    """

    def __init__(self, prompt: int = 0, by_token: bool = False, predicted: bool = False) -> None:
        self._prompt = prompt
        self._predicted = {"accepted": 0, "rejected": 0} if predicted else None
        self._sources: list[str] | None = [] if by_token else None
        self._open: list[Outcome] = []  # not counted yet: the answer may end within them
        self._steps = 0
        self._drafted, self._accepted = np.zeros((2, SOURCES), np.int64)

    def add(self, outcome: Outcome) -> None:
        """Outcomes come in order. The prompt's forward has one as well, which is no step."""
        self._open.append(outcome)
        if len(self._open) > UNSETTLED:
            settled = self._open.pop(0)
            self._count(settled, len(settled.tokens))

    def _count(self, outcome: Outcome, room: int) -> None:
        """Counts one outcome.

        room: how many of its tokens belong to the answer.
        """
        self._steps += outcome.start > self._prompt
        of = outcome.tree.sources
        if len(of):
            self._drafted += np.bincount(of, minlength=SOURCES)
            self._accepted += np.bincount(of[outcome.accepted][:room], minlength=SOURCES)
        if self._predicted is not None and len(outcome.predicted):
            on_path = outcome.accepted[_shared(outcome.tree, outcome.predicted)]
            accepted = min(int(on_path.sum()), room)
            self._predicted["accepted"] += accepted
            self._predicted["rejected"] += int((~on_path).sum())
        if self._sources is not None:
            self._keep(self._sources, outcome)

    def _keep(self, sources: list[str], outcome: Outcome) -> None:
        """Tokens that were taken back make place for those that are drawn again."""
        begin = outcome.start - self._prompt
        del sources[begin:]
        # A decode instance gets the first token from elsewhere.
        sources += [TARGET] * (begin - len(sources))
        sources += map(source_name, outcome.tree.sources[outcome.accepted].tolist())
        sources += [TARGET] * (begin + len(outcome.tokens) - len(sources))

    def summary(self, length: int) -> dict[str, object]:
        """What an answer of `length` tokens took. steps: forwards after the prompt's. drafted, accepted: tokens by source. sources: of each
        output token, where they are kept. prediction: tokens that the request's own reference proposed, whoever else did, where it brought
        one. Accepted tokens behind the end of the answer do not count."""
        end = self._prompt + length
        for outcome in [outcome for outcome in self._open if outcome.start < end]:
            self._count(outcome, end - outcome.start)
            self._open.remove(outcome)
        told: dict[str, object] = {
            "steps": self._steps,
            "drafted": _by_name(self._drafted),
            "accepted": _by_name(self._accepted),
        }
        if self._predicted is not None:
            told[PREDICTION] = dict(self._predicted)
        if self._sources is None:
            return told
        # An answer that ends at its prefill is told before the prefill's outcome.
        return told | {"sources": self._sources[:length] or [TARGET] * length}


def _shared(tree: DraftTree, other: DraftTree) -> list[int]:
    """The nodes of a tree whose paths are in the other one too."""
    edges = {
        edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    }
    place = {-1: -1}  # nodes of the other -> of the tree
    for node, (parent, token) in enumerate(zip(other.parents.tolist(), other.tokens.tolist(), strict=True)):
        there = edges.get((place.get(parent), token))
        if there is not None:
            place[node] = there
    return [node for node in place.values() if node >= 0]


def _by_name(numbers: np.ndarray) -> dict[str, int]:
    return {source_name(source): int(numbers[source]) for source in np.flatnonzero(numbers).tolist()}
