"""What one request's decoding took: steps, drafted and accepted tokens by who proposed them."""

from __future__ import annotations

import numpy as np

from sglang_patches.drafting.outcome import Outcome
from sglang_patches.drafting.source import SOURCES, source_name

TARGET = "target"  # source of a token that nobody drafted


class Usage:
    """prompt: tokens. by_token: whether each output token's source is kept.

    Drafted tokens are the nodes that were verified. SGLang's `spec_num_proposed_drafts` counts the widest tree in each step instead.
    A step counts even if SGLang drops its result because it retracts the request.
    """

    def __init__(self, prompt: int = 0, by_token: bool = False) -> None:
        self._prompt = prompt
        self._sources: list[str] | None = [] if by_token else None
        self._last: Outcome | None = None  # not counted yet
        self._steps = 0
        self._drafted, self._accepted = np.zeros((2, SOURCES), np.int64)

    def add(self, outcome: Outcome) -> None:
        """Outcomes come in order. The prompt's forward has one as well, which is no step."""
        if self._last is not None:
            self._count(self._last)
        self._last = outcome

    def _count(self, outcome: Outcome) -> None:
        self._steps += outcome.start > self._prompt
        of = outcome.tree.sources
        if len(of):
            self._drafted += np.bincount(of, minlength=SOURCES)
            self._accepted += np.bincount(of[outcome.accepted], minlength=SOURCES)
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
        """Of an answer of `length` tokens; overlap scheduling may have run one step more. steps: forwards after the prompt's. drafted,
        accepted: tokens by source. sources: of each output token, where they are kept."""
        if self._last is not None and self._last.start < self._prompt + length:
            self._count(self._last)
            self._last = None
        told: dict[str, object] = {
            "steps": self._steps,
            "drafted": _by_name(self._drafted),
            "accepted": _by_name(self._accepted),
        }
        return told if self._sources is None else told | {"sources": self._sources[:length]}


def _by_name(numbers: np.ndarray) -> dict[str, int]:
    return {source_name(source): int(numbers[source]) for source in np.flatnonzero(numbers).tolist()}
