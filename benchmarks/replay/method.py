"""One interface for all drafting methods, and the replay of a recorded answer through one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.playback import accepted_nodes
from benchmarks.traces import Trace
from datastore_service.protocol.tree import DraftTree


class Method:
    """A drafting method, called as its own server calls it; one session at a time. Token ids are int32 arrays."""

    def begin(self, prompt: np.ndarray) -> None:
        """A session begins; the target prefills meanwhile, so this is not timed."""

    def draft(self, text: np.ndarray) -> DraftTree:
        """The draft after `text`, prompt and output so far. All that stands between the last verification and this
        draft belongs in here: it is what is timed."""
        raise NotImplementedError

    def verifying(self, text: np.ndarray) -> None:
        """What the method does while the target verifies the draft after `text`."""

    def verified(self, tree: DraftTree, known: int, accepted: np.ndarray) -> None:
        """accepted: bool [nodes], those on the path of what the target wrote. known: tokens before the draft."""

    def end(self, text: np.ndarray) -> None:
        """The session's whole text."""


@dataclass(frozen=True)
class Step:
    """A verified draft. accepted: bool [nodes]. tokens: what the step yields, with the target's own."""

    tree: DraftTree
    accepted: np.ndarray
    tokens: int
    nanoseconds: int


def tree_of(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """A draft without estimates, its nodes in topological order; of siblings with one token the first is kept, and what
    hangs below the others hangs below it."""
    kept: dict[tuple[int, int], int] = {}
    place = {-1: -1}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        place[node] = kept.setdefault((place[parent], token), len(kept))
    size = len(kept)
    return DraftTree(
        np.array([token for _, token in kept], np.int32),
        np.array([parent for parent, _ in kept], np.int32),
        np.ones(size, np.float32),
        np.zeros(size, np.uint8),
    )


def chain_of(tokens: Sequence[int]) -> DraftTree:
    return tree_of(tokens, range(-1, len(tokens) - 1))


def replay(method: Method, trace: Trace) -> Iterator[Step]:
    """A session that drafts for each step of an answer. The first token comes from the prefill."""
    text = np.concatenate([trace.prompt, trace.output])
    method.begin(trace.prompt)
    known = len(trace.prompt) + 1
    while known < len(text):
        started = time.perf_counter_ns()
        tree = method.draft(text[:known])
        elapsed = time.perf_counter_ns() - started
        method.verifying(text[:known])
        accepted = accepted_nodes(tree, text[known:])
        tokens = min(int(accepted.sum()) + 1, len(text) - known)
        yield Step(tree, accepted, tokens, elapsed)
        method.verified(tree, known, accepted)
        known += tokens
    method.end(text)
