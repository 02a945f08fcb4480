"""SAGUARO (Speculative Speculative Decoding, section 4): outcomes are guessed by geometric fan-out, a speculation is drafted after each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_patches.drafting.draft import Candidates, Draft
from sglang_patches.drafting.drafter import Drafter, Grown, Leaf
from sglang_patches.drafting.predictor import Guess, OutcomePredictor

MOST_GUESSES = 16  # after one node
_PRIOR = 20.0  # pseudo-observations


def fan_out(ends: np.ndarray, exponent: float, budget: int) -> np.ndarray:
    """Theorem 12: how many guesses each end of a verification gets, float64, of sum `budget`.

    ends: probability that the accepted path ends there. exponent: r of the miss rate F^-r. For a chain of K drafted tokens that
    are accepted with probability a, ends = a^k (1 - a) and a^K, which gives the theorem's capped geometric series.
    """
    weights = ends ** (1 / (1 + exponent))
    return budget * weights / weights.sum()


def rounded(shares: np.ndarray, most: int) -> np.ndarray:
    """int64 of about the same sum, at most `most` each; the theorem has no rounding rule. Largest remainders are rounded up."""
    whole = np.minimum(np.floor(shares), most).astype(np.int64)
    left = int(round(shares.sum())) - int(whole.sum())
    order = np.argsort(-(shares - whole), kind="stable")
    for at in order[: max(0, left)]:
        whole[at] = min(whole[at] + 1, most)
    return whole


class GeometricFanOut(OutcomePredictor):
    """Learns how often a verified node is accepted and how often the target's own token is the draft model's f-th choice."""

    def __init__(self) -> None:
        self._accepted, self._verified = 0.7 * _PRIOR, _PRIOR
        ranks = np.arange(1, MOST_GUESSES + 1)
        self._hits = _PRIOR * (1 / ranks - 1 / (ranks + 1))
        self._ends = _PRIOR

    @property
    def acceptance(self) -> float:
        """a: of a verified node whose parent was accepted."""
        return self._accepted / self._verified

    @property
    def rank_rates(self) -> np.ndarray:
        """float64 [MOST_GUESSES]: that the target's own token is the f-th choice, the verified ones left out."""
        return self._hits / self._ends

    @property
    def exponent(self) -> float:
        """r of Definition 11, from the first and the last rank: their miss rates lie on a line in a log-log plot."""
        misses = 1 - np.cumsum(self.rank_rates)
        first, last = np.maximum(misses[[0, -1]], 1e-3)
        return max(0.1, float(np.log(first / last) / np.log(MOST_GUESSES)))

    def guesses(self, draft: Draft, budget: int) -> list[Guess]:
        nodes, ends = self._ends_of(draft)
        counts = rounded(fan_out(ends, self.exponent, budget), MOST_GUESSES)
        rates = self.rank_rates
        return [
            Guess(node, token, float(end * rates[rank]))
            for node, end, count in zip(nodes, ends.tolist(), counts.tolist(), strict=True)
            for rank, token in enumerate(_choices(draft, node)[:count])
        ]

    def learn(self, draft: Draft, path: Sequence[int], tokens: Sequence[int]) -> None:
        if draft.verifying is None:
            return
        verifying = set(draft.verifying)
        accepted = [node for node in path if node in verifying]
        end = accepted[-1] if accepted else draft.trie.root
        self._accepted += len(accepted)
        self._verified += len(accepted) + bool(draft.verified_tokens(end))
        if end in draft.candidates and len(accepted) < len(tokens):
            self._ends += 1
            choices = _choices(draft, end)
            if tokens[len(accepted)] in choices:
                self._hits[choices.index(tokens[len(accepted)])] += 1

    def _ends_of(self, draft: Draft) -> tuple[list[int], np.ndarray]:
        """The nodes where the accepted path may end, and how likely it ends at each: float64."""
        reach = {draft.trie.root: 1.0}
        ends: dict[int, float] = {draft.trie.root: 1.0}
        for node in draft.verifying or ():
            parent = draft.trie.parent(node)
            siblings = len(draft.verified_tokens(parent))
            reach[node] = ends[node] = reach[parent] * self.acceptance / siblings
            ends[parent] -= reach[node]
        return list(ends), np.maximum(np.array(list(ends.values())), 1e-9)


def _choices(draft: Draft, node: int) -> list[int]:
    """The draft model's, the likeliest first, but for the tokens that are being verified."""
    verified = draft.verified_tokens(node)
    tokens = draft.candidates[node].tokens.tolist()
    return [token for token in tokens if token not in verified][:MOST_GUESSES]


class Rollouts(Drafter):
    """Drafts a chain of `lookahead` tokens (K) after every start, the likeliest start first."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead

    def leaves(self, draft: Draft) -> list[Leaf]:
        if draft.verifying is not None and not draft.starts:
            return [Leaf(node, 1.0) for node in draft.missing()]
        return [leaf for start, chance in draft.starts.items() for leaf in self._leaves(draft, start, chance)]

    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        return [Grown(node, int(candidates.tokens[0]), float(candidates.probabilities[0]))]

    def _leaves(self, draft: Draft, start: int, chance: float) -> list[Leaf]:
        found, waiting = [], [(start, chance, 0)]
        while waiting:
            node, value, depth = waiting.pop()
            if depth >= self._lookahead:
                continue
            if node not in draft.candidates:
                found.append(Leaf(node, value))
            waiting += [(child, value * p, depth + 1) for child, _, p in draft.trie.children(node)]
        return found
