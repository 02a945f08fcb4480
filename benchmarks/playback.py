"""A session whose text is known: its entries to a datastore, and what each draft gets accepted."""

from __future__ import annotations

import numpy as np

from datastore_service.protocol.tree import DraftTree
from datastore_service.protocol.types import NO_DRAFT, Budget, Entry, Opening
from sglang_patches.ledger.outcome import settle


def accepted_nodes(tree: DraftTree, following: np.ndarray) -> np.ndarray:
    """bool [nodes]: which of the tree's nodes lie on the path of the tokens (int32) that follow the draft."""
    return settle([None], [tree], [0], [following])[0].accepted


class Playback:
    """text: int32, prompt and output. known: its leading tokens that are decoded so far."""

    def __init__(self, name: str, text: np.ndarray, known: int, opening: Opening) -> None:
        self._name, self._text, self.known = name, text, min(known, len(text))
        self._opening: Opening | None = opening
        self._sent = 0

    @property
    def ended(self) -> bool:
        return self.known == len(self._text)

    @property
    def following(self) -> np.ndarray:
        """int32, what is not decoded yet."""
        return self._text[self.known :]

    def entry(self, budget: Budget = NO_DRAFT) -> Entry:
        """What is known and was not sent before."""
        tokens = self._text[self._sent : self.known]
        entry = Entry(self._name, self._sent, tokens, budget=budget, opening=self._opening)
        self._sent, self._opening = self.known, None
        return entry

    def closing(self) -> Entry:
        """The rest of the text."""
        return Entry(self._name, self._sent, self._text[self._sent :], opening=self._opening, closing=True)

    def accepted(self, tree: DraftTree) -> np.ndarray:
        """bool [nodes]"""
        return accepted_nodes(tree, self.following)

    def advance(self, tokens: int) -> int:
        """Decodes so many more; how many there were."""
        gained = min(tokens, len(self._text) - self.known)
        self.known += gained
        return gained

    def follow(self, tree: DraftTree) -> int:
        """Decodes what the target makes of a draft: the accepted tokens and one of its own; how many there were."""
        return self.advance(int(self.accepted(tree).sum()) + 1)
