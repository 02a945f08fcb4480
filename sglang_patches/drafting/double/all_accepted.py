"""The draft side goes on as if the target accepted all that it has drafted (section 4.1, synchronous parallel execution)."""

from __future__ import annotations

from sglang_patches.drafting.draft import Draft
from sglang_patches.drafting.predictor import Guess, OutcomePredictor


class AllAccepted(OutcomePredictor):
    """One guess: the target follows the draft model's choices down the verified tree and one token beyond it.

    What the target retrieved is in the tree too. Of that the guess passes what the draft model would have chosen.
    """

    def guesses(self, draft: Draft, budget: int) -> list[Guess]:
        end = self._end(draft)
        token, chance = (array[0] for array in draft.candidates[end])
        return [] if int(token) in draft.sampling.ends else [Guess(end, int(token), float(chance))]

    def missing(self, draft: Draft) -> list[int]:
        """The first node on the path of the draft model's choices that was not run, and the verified nodes below it, which are run
        in the same forward."""
        end = self._end(draft)
        if end in draft.candidates:
            return []
        below = {end}
        for node in draft.verifying or ():  # a parent before its children
            if draft.trie.parent(node) in below:
                below.add(node)
        return [node for node in below if node not in draft.candidates]

    @staticmethod
    def _end(draft: Draft) -> int:
        """The last verified node on the path of the draft model's choices, as far as they are known."""
        node, verifying = draft.trie.root, set(draft.verifying or ())
        while node in draft.candidates:
            child = draft.trie.child(node, int(draft.candidates[node].tokens[0]))
            if child not in verifying:
                break
            node = child
        return node
