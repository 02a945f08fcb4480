"""The draft side goes on as if the target accepted all that it has drafted (section 4.1, synchronous parallel execution)."""

from __future__ import annotations

from sglang_patches.draft_side.draft import Draft
from sglang_patches.draft_side.seams import Guess, OutcomePredictor, Prediction

GOES_ON = 0.7  # assumed chance that a choice of the draft model is verified: it orders rows


class AllAccepted(OutcomePredictor):
    """One guess: the target follows the draft model's choices down the verified tree and one token beyond it.

    What the target retrieved is in the tree too. Of that the guess passes what the draft model would have chosen.
    """

    def predict(self, draft: Draft, budget: int) -> Prediction:
        end = self._end(draft)
        if end not in draft.candidates:
            return Prediction([], self._chances(draft, end))
        token, chance = (array[0] for array in draft.candidates[end])
        ends = int(token) in draft.sampling.ends
        return Prediction([] if ends else [Guess(end, int(token), float(chance))], {})

    @staticmethod
    def _chances(draft: Draft, node: int) -> dict[int, float]:
        """How likely the path of the draft model's choices, which comes to this node, goes on to each verified node below it."""
        chances = {node: 1.0}
        for above in draft.ends:
            if above in chances:
                below = draft.verified_children(above).values()
                chances |= dict.fromkeys(below, chances[above] * GOES_ON / max(1, len(below)))
        return chances

    @staticmethod
    def _end(draft: Draft) -> int:
        """The last verified node on the path of the draft model's choices, as far as they are known."""
        node = draft.trie.root
        while node in draft.candidates:
            child = draft.verified_children(node).get(int(draft.candidates[node].tokens[0]))
            if child is None:
                break
            node = child
        return node
