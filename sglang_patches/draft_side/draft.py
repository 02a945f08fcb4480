"""What the draft side knows of one session."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sglang_patches.exchange.messages import Sampling
from sglang_patches.exchange.text import Text
from sglang_patches.exchange.trie import ROOT, Trie


class Candidates(NamedTuple):
    """What the draft model would go on with after a node, the first choice first.

    tokens: int32 [count]. With the target's noise the first is the draft model's own draw. probabilities: float32 [count].
    """

    tokens: np.ndarray
    probabilities: np.ndarray


@dataclass(slots=True, eq=False)
class Draft:
    """One session, as the draft side follows it.

    candidates: what may follow each node that was run and is still in the trie.
    verifying: the root and the nodes that the target verifies and that may be followed by others, a parent before its children; of
        each its children among them, by token. None if nothing is verified.
    expected: what an early exit of the target expects after those nodes. None of them until it has said so.
    starts: nodes that a next speculation may begin at, and how likely that is.
    confirmed: tokens of the text that no retraction takes back; the datastore was sent them.
    published_from: as in `Opened`.
    verified_at: when its verification began, None while there is none.
    forwards: number of forwards that were run for it since then.
    last_run: number of the draft side's forward that ran a row of it last.
    basis: of the last prediction of its outcome, None before the first.
    unknown: nodes that this prediction wants run, and what that is worth.
    wanted: whether the target verifies drafts for the session, as far as it has said.
    told: whether there was a verification since the last commit.
    tenant: that the request named.
    frontier: the drafter's own, with the starts that it belongs to."""

    session: str
    text: Text
    sampling: Sampling
    trie: Trie
    candidates: dict[int, Candidates] = field(default_factory=dict)
    verifying: dict[int, dict[int, int]] | None = None
    expected: dict[int, Candidates] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=lambda: {ROOT: 1.0})
    confirmed: int = 0
    published_from: int | None = None
    verified_at: float | None = None
    forwards: int = 0
    last_run: int = 0
    basis: Hashable = None
    unknown: dict[int, float] = field(default_factory=dict)
    wanted: bool = True
    told: bool = True
    tenant: str = ""
    frontier: tuple[dict[int, float], list[tuple[int, float, int]]] = field(default_factory=lambda: ({}, []))

    def __post_init__(self) -> None:
        self.confirmed = self.text.length

    def finishes(self, node: int) -> bool:
        """Whether the request ends with the token of this node. Nothing follows it."""
        return node != self.trie.root and self.trie.token(node) in self.sampling.ends

    @property
    def ends(self) -> list[int]:
        """Nodes where the verification may end, a parent before its children."""
        return [self.trie.root] if self.verifying is None else list(self.verifying)

    def verified_children(self, node: int) -> dict[int, int]:
        """Those of the node's children that are being verified, by their tokens."""
        return (self.verifying or {}).get(node, {})

    def verify(self, nodes: list[int]) -> None:
        """Begins a verification of these nodes, a parent before its children."""
        self.verifying = {self.trie.root: {}}
        for node in nodes:
            siblings = self.verifying.get(self.trie.parent(node))
            if siblings is not None and not self.finishes(node):
                siblings[self.trie.token(node)] = node
                self.verifying[node] = {}
        self.expected, self.starts, self.confirmed = {}, {}, self.text.length
        self.forwards, self.basis, self.unknown = 0, None, {}
        self.wanted = self.told = True

    def commit(self, path: list[int], tokens: np.ndarray, epoch: int) -> bool:
        """Goes on by committed tokens; False if the two sides' tries have parted. path: the nodes that carry the tokens, as far as the trie
        has them."""
        missed = len(path) < len(tokens)
        if missed and epoch == self.trie.epoch:
            return False
        self.text.rewrite(self.text.length, tokens)
        self.trie.advance(path, len(tokens))
        if missed:
            self.trie.begin_epoch(epoch)
            self.candidates = {}
        self.candidates = {node: of for node, of in self.candidates.items() if node in self.trie}
        if epoch != self.trie.epoch:
            before = self.trie.root
            self.trie.restart(epoch)
            if before in self.candidates:
                self.candidates[self.trie.root] = self.candidates.pop(before)
        self.verifying, self.expected = None, {}
        self.starts, self.forwards, self.unknown = {self.trie.root: 1.0}, 0, {}
        self.wanted, self.told = self.told, False
        return True
