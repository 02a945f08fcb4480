"""Which outcomes of a verification are guessed (section 4.1): more of them where the accepted path is more likely to end."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import Guess, OutcomePredictor, Prediction
from sglang_patches.ledger.rates import RateTable

RANKS = 32  # choices of the draft model after a node that may be guessed
MEMORY = 4000  # the counts follow the last so many tokens, and hints of a class
_PRIOR = 20.0  # pseudo-observations before the first
HINT_PRIOR, HINT_TRUST = (
    4.0,
    0.5,
)  # pseudo-observations of each class of hints; the first rate, over the datastore's estimate
RANK_CLASSES = 7
BINS = 5  # of an estimate
BIN_CENTRES = (np.arange(BINS) + 0.5) / BINS


def fan_out(ends: np.ndarray, exponent: float, budget: float) -> np.ndarray:
    """Theorem 12: how many guesses each end of a verification gets, float64, of sum `budget`.

    ends: probability that the accepted path ends there. exponent: r of the miss rate F^-r. For a chain of K drafted tokens that
    are accepted with probability a, ends = a^k (1 - a) and a^K, which gives the theorem's capped geometric series.
    """
    weights = ends ** (1 / (1 + exponent))
    return budget * weights / weights.sum()


def rounded(shares: np.ndarray, most: np.ndarray) -> np.ndarray:
    """int64, in all at most the rounded sum of the shares, and none above its entry of `most`.

    The theorem has no rounding rule. Here the largest remainders are rounded up, and what an end cannot use goes to the others.
    """
    whole = np.minimum(np.floor(shares), most).astype(np.int64)
    left = round(float(shares.sum())) - int(whole.sum())
    while left > 0 and (room := whole < most).any():
        order = np.argsort(np.where(room, whole - shares, np.inf), kind="stable")
        chosen = order[: min(left, int(room.sum()))]
        whole[chosen] += 1
        left -= len(chosen)
    return whole


class End(NamedTuple):
    """A node where the accepted path may end. reached, ends: probability that the path comes to it, and that it ends there with
    a token after which the request goes on. known: whether anything is known of what follows it. choices: rate and token of what is
    not verified and does not end the request, the likeliest first."""

    node: int
    reached: float
    ends: float
    known: bool
    choices: list[tuple[float, int]]


class GeometricFanOut(OutcomePredictor):
    """Learns how often the target's own token is the draft model's f-th choice.

    Every token that a verification emits is one observation, whether it was drafted or not: the path came to its node because
    of the tokens before it. The rate of the first choice is the paper's acceptance rate a. What the datastore proposes at a node
    is a choice too, with a rate of its own.
    """

    def __init__(self) -> None:
        # The first choice is right in 7 of 10 cases, the miss rates of the others fall as 1 / (F + 1).
        ranks = np.arange(1, RANKS)
        others = np.append(1 / ranks - 1 / (ranks + 1), 1 / RANKS)
        self._counts = _PRIOR * np.append(0.7, 0.3 * others)
        # Of the datastore's proposals, by the token's rank among the draft model's choices and by the datastore's estimate.
        self._hints = RateTable(np.tile(HINT_TRUST * BIN_CENTRES, (RANK_CLASSES, 1)), HINT_PRIOR, MEMORY)

    @property
    def rates(self) -> np.ndarray:
        """float64 [RANKS + 1], of sum 1: that the target's own token is the f-th choice, and that it is none of them."""
        return self._counts / self._counts.sum()

    @property
    def exponent(self) -> float:
        """r of Definition 11, from F = 1 and the largest F: a power law is a line in a log-log plot."""
        rates = self.rates
        misses = 1 - np.cumsum(rates[1:-1]) / (1 - rates[0])
        first, last = np.maximum(misses[[0, -1]], 1e-3)
        return max(0.1, float(np.log(first / last) / np.log(RANKS - 1)))

    def predict(self, draft: Draft, budget: int) -> Prediction:
        """Guesses where the draft model has been: of the budget, the known ends' share of all that is likely. A tree of the datastore has
        ends that the draft model has never seen, and they must not delay the likely ones."""
        ends = self._ends(draft)
        known = [end for end in ends if end.known]
        unknown = {end.node: end.ends for end in ends if not end.known}
        if not known:
            return Prediction([], unknown | {draft.trie.root: 1.0})
        share = sum(end.ends for end in known) / max(1e-9, sum(end.ends for end in ends))
        return Prediction(self.guesses(known, math.ceil(budget * share)), unknown)

    def guesses(self, ends: Sequence[End], budget: int) -> list[Guess]:
        """The likeliest choices of each of the ends, at least one."""
        chances = np.array([max(end.ends, 1e-9) for end in ends])
        most = np.array([len(end.choices) for end in ends])
        return [
            Guess(end.node, token, end.reached * rate)
            for end, count in zip(ends, rounded(self.shares(chances, budget), most).tolist(), strict=True)
            for rate, token in end.choices[:count]
        ]

    def shares(self, ends: np.ndarray, budget: int) -> np.ndarray:
        """How many guesses each end gets, before rounding."""
        return fan_out(ends, self.exponent, budget)

    def learn(self, draft: Draft, path: Sequence[int], tokens: Sequence[int]) -> None:
        if draft.verifying is None:
            return
        nodes = [draft.trie.root, *(node for node in path if node in draft.verifying)]
        for node, token in zip(nodes, tokens, strict=False):  # the last node's token is the target's own
            self.learn_at(draft, node, token)

    def learn_at(self, draft: Draft, node: int, token: int) -> None:
        """The target's own token after a verified node."""
        if node not in draft.candidates:
            return
        ranks = ranks_at(draft, node)
        self.learn_choice(draft.candidates[node], ranks.get(token, RANKS))
        if hints := draft.hints.get(node):
            self._hints.learn(_hint_cells(hints, ranks), np.array([hint == token for hint in hints]))

    def learn_choice(self, candidates: Candidates, rank: int) -> None:
        """The target's own token was this choice, or none of them: RANKS."""
        self._counts *= 1 - 1 / MEMORY
        self._counts[rank] += 1

    def choices(self, draft: Draft, node: int) -> dict[int, float]:
        """What may follow a verified node: tokens, and how likely they are the target's. Nothing where that is not known."""
        if node not in draft.candidates:
            return {}
        ranks, of_rank = ranks_at(draft, node), self.rates_of(draft.candidates[node])
        rates = {token: of_rank[rank] for token, rank in ranks.items()}
        if hints := draft.hints.get(node):
            rates |= zip(hints, self._hints.rates(_hint_cells(hints, ranks)).tolist(), strict=True)
        return rates

    def rates_of(self, candidates: Candidates) -> list[float]:
        """`rates` of these candidates."""
        return self.rates.tolist()

    def _ends(self, draft: Draft) -> list[End]:
        """The root and every verified node that may be followed."""
        first, none = self.rates[[0, RANKS]].tolist()
        reached, found = {draft.trie.root: 1.0}, []
        for node in draft.ends:
            verified, rates = draft.verified_children(node), self.choices(draft, node)
            unknown = none if rates else first / max(1, len(verified))
            ends = 1 - sum(rates.get(token, 0.0) for token in draft.sampling.ends)
            for token, child in verified.items():
                accepted = rates.get(token, unknown)
                reached[child] = reached[node] * accepted
                ends -= accepted
            no_guess = verified.keys() | draft.sampling.ends
            likeliest = [(rate, token) for token, rate in rates.items() if token not in no_guess]
            likeliest.sort(reverse=True, key=operator.itemgetter(0))
            found.append(End(node, reached[node], reached[node] * max(0.0, ends), bool(rates), likeliest))
        return found


def _hint_cells(hints: Mapping[int, float], ranks: Mapping[int, int]) -> tuple[np.ndarray, ...]:
    """The cells of a node's hints.

    hints: the datastore's estimates, by token.
    ranks: of the draft model's choices, by token.
    """
    return rank_classes([ranks.get(token, RANKS) for token in hints]), estimate_bins(list(hints.values()))


def rank_classes(ranks: Sequence[int]) -> np.ndarray:
    """int64, the ranks' classes: 0, 1, 2 to 3, 4 to 7, and so on, as `bit_length` counts."""
    return np.array([min(rank.bit_length(), RANK_CLASSES - 1) for rank in ranks])


def estimate_bins(estimates: Sequence[float]) -> np.ndarray:
    """int64, which of equal parts of 0 to 1 each estimate lies in."""
    return np.minimum((np.array(estimates) * BINS).astype(np.int64), BINS - 1)


def ranks_at(draft: Draft, node: int) -> dict[int, int]:
    """The rank of each of the draft model's choices after a node; none if it was not run."""
    if node not in draft.candidates:
        return {}
    return {token: rank for rank, token in enumerate(draft.candidates[node].tokens[:RANKS].tolist())}
