"""An epoch is a version of the model's weights, and says which of them has written a document. In reinforcement learning each update of the
weights begins one.

No document says its epoch. They are numbered in the order of their publication, so the first number of each epoch tells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from datastore_service.engine.provenance import Selection

MOST_KNOWN = 256  # epochs whose first numbers are kept


@dataclass(frozen=True, slots=True)
class Epochs:
    """The present epoch and those before it.

    begun: each with the first number of its documents, oldest first. What is older than all of them counts as the epoch before the
    first."""

    begun: tuple[tuple[int, int], ...] = ()

    @property
    def current(self) -> int:
        """The present epoch; 0 before the first update."""
        return self.begun[-1][0] if self.begun else 0

    def begin(self, epoch: int, first: int) -> Epochs:
        """These epochs and a later one. first: the first number of its documents."""
        return Epochs((*self.begun, (epoch, first))[-MOST_KNOWN:])

    def ages(self, provenance: np.ndarray) -> np.ndarray:
        """uint64 [documents]: how many epochs ago each was published. provenance: PROVENANCE [documents]."""
        if not self.begun:
            return np.zeros(len(provenance), np.uint64)
        epochs, firsts = np.array(self.begun, np.uint64).T
        # What is no output has no number, which is a time in microseconds.
        numbers = np.maximum(provenance["number"], provenance["published"] * np.uint64(1_000_000))
        places = np.searchsorted(firsts, numbers, side="right")
        return epochs[-1] - np.concatenate((epochs[:1] - np.uint64(1), epochs))[places]

    def older_than(self, keep: int) -> Selection:
        """Selects the documents of all but the newest epochs. keep: how many these are."""
        return lambda provenance: self.ages(provenance) >= keep
