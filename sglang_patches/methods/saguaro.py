"""SAGUARO (Kumar et al., Speculative Speculative Decoding, section 4).

On the draft side `GeometricFanOut` says which outcomes of a verification are guessed, more of them where the accepted path is more likely
to end (section 4.1), and `Rollouts` what is drafted after each (Algorithm 1). In the worker `SaguaroFallback` says what happens after a
miss (section 4.3): the step waits for a speculation just in time, or another drafter answers at once.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from datastore_service.protocol.tree import DraftTree
from sglang_patches.draft_side.draft import Candidates, Draft
from sglang_patches.draft_side.seams import Drafter, Grown, Guess, Leaf, OutcomePredictor, Prediction
from sglang_patches.drafting.seams import NO_PATIENCE, Fallback, NoFallback, Patience
from sglang_patches.drafting.union import Part
from sglang_patches.ledger.rates import RunningMean, per_tenant
from sglang_patches.ledger.requests import DraftSource

if TYPE_CHECKING:
    from sglang_patches.ledger.outcome import Outcome
    from sglang_patches.ledger.requests import RequestState

# The draft side's.
RANKS = 32  # choices of the draft model after a node that may be guessed
MEMORY = 4000  # the counts follow the last so many tokens
_CHOICE_PRIOR = 20.0  # pseudo-observations before the first
RANK_CLASSES = 7
BINS = 5  # of an estimate
BIN_CENTRES = (np.arange(BINS) + 0.5) / BINS
# The worker's.
LONGEST_WAIT = 1.0  # seconds
RATE = 0.01  # of a running mean
ENOUGH = 64  # of the fallback's trees, before a step may wait in place of one
RECENT, FEW = 9, 3  # times that a median is taken of: of steps, of waits
# One step in so many with a miss does the other thing, so that both stay measured. Waits for that take 1% of the time at most.
PROBE, PROBE_SHARE = 32, 0.01
WAIT_PRIOR = 8  # waits, until which one is believed to be as good as a hit
LEAST = 0.05  # of a probability that is divided by
GRACE = 2.0  # a speculation just in time is waited for so many times as long as one takes


class Rollouts(Drafter):
    """Drafts a chain of `lookahead` tokens (K) after every start, the likeliest start first. A chain stops at a token that ends
    the request."""

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead

    def leaves(self, draft: Draft) -> list[Leaf]:
        return [Leaf(node, value) for node, value, _ in self._frontier(draft)]

    def grow(self, node: int, candidates: Candidates) -> list[Grown]:
        return [Grown(node, int(candidates.tokens[0]), float(candidates.probabilities[0]))]

    def _frontier(self, draft: Draft) -> list[tuple[int, float, int]]:
        """Node, value and depth below its start of all that is not run. Goes on from the last round's, unless the starts are new."""
        starts, waiting = draft.frontier
        if starts is not draft.starts:
            waiting = [(start, chance, 0) for start, chance in draft.starts.items()]
        found = []
        while waiting:
            node, value, depth = waiting.pop()
            if depth >= self._lookahead or draft.finishes(node):
                continue
            if node in draft.candidates:
                waiting += [(child, value * p, depth + 1) for child, _, p in draft.trie.children(node)]
            else:
                found.append((node, value, depth))
        draft.frontier = draft.starts, found
        return list(found)


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
    of the tokens before it. The rate of the first choice is the paper's acceptance rate a.
    """

    def __init__(self) -> None:
        # The first choice is right in 7 of 10 cases, the miss rates of the others fall as 1 / (F + 1).
        ranks = np.arange(1, RANKS)
        others = np.append(1 / ranks - 1 / (ranks + 1), 1 / RANKS)
        self._counts = _CHOICE_PRIOR * np.append(0.7, 0.3 * others)

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
        self.learn_choice(draft.candidates[node], ranks_at(draft, node).get(token, RANKS))

    def learn_choice(self, candidates: Candidates, rank: int) -> None:
        """The target's own token was this choice, or none of them: RANKS."""
        self._counts *= 1 - 1 / MEMORY
        self._counts[rank] += 1

    def choices(self, draft: Draft, node: int) -> dict[int, float]:
        """What may follow a verified node: tokens, and how likely they are the target's. Nothing where that is not known."""
        if node not in draft.candidates:
            return {}
        ranks, of_rank = ranks_at(draft, node), self.rates_of(draft.candidates[node])
        return {token: of_rank[rank] for token, rank in ranks.items()}

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


class Kind(Enum):
    """What a request's tree is: prepared before the step, waited for, or the fallback's."""

    HIT = auto()
    WAITED = auto()
    MISSED = auto()


HIT, WAITED, MISSED = Kind


def worth_waiting(tokens: float, seconds: float, rate: float) -> bool:
    """Theorem 17's comparison for one step: whether to wait `seconds` for `tokens` more, where the mean is `rate` tokens a second.

    Theorem 17 compares the mean tokens a second of two rules: to wait after every miss, and never to wait. With the mean gain and
    the mean wait of a step, this comparison prefers the same rule, whichever rule the rate was measured with. So it changes its
    answer at the theorem's batch size b*. The worker knows more than the theorem: how many misses this step has.
    """
    return tokens > rate * seconds


def fallback_of(
    name: str, datastore: Fallback, lookahead: int, now: Callable[[], float] = time.monotonic
) -> Fallback:
    """The fallback that the option `fallback` names.

    name: value of the option.
    lookahead: tokens of a speculation just in time.
    now: seconds by a steady clock.
    """
    if name == "none":
        return NoFallback()
    if name == "draft":
        return WaitingFallback(NoFallback(), lookahead, LONGEST_WAIT)
    return SaguaroFallback(datastore, lookahead, LONGEST_WAIT, now)


class WaitingFallback(Fallback):
    """The step waits for a speculation just in time, at most `longest` seconds. Then `other` drafts what is still missing."""

    def __init__(self, other: Fallback, lookahead: int, longest: float) -> None:
        self._other = other
        self._patience = Patience(longest, lookahead)

    def parts(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[list[Part]]:
        return self._other.parts(states, found)

    def patience(self, states: Sequence[RequestState], missed: Sequence[int]) -> Patience:
        return self._patience if missed else NO_PATIENCE


@dataclass(slots=True)
class _LastStep:
    """What a request's last step began with.

    kind: of its tree. drafted: whether one was made. heard: whether its outcome is known.
    """

    kind: Kind
    drafted: bool
    heard: bool = False


class SaguaroFallback(WaitingFallback):
    """Waits in the steps where that is worth it, by what it has measured. now: seconds by a steady clock."""

    def __init__(
        self, other: Fallback, lookahead: int, longest: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(other, lookahead, longest)
        self._now = now
        self._learned = per_tenant(_Learned)
        self._last: dict[RequestState, _LastStep] = {}
        self._waited = _mean()  # seconds a step
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds of each, without waiting
        self._in_time: deque[float] = deque(maxlen=FEW)  # seconds that a speculation took
        self._decisions, self._probed_at = 0, 0.0
        self._asked, self._asked_rows = NO_PATIENCE, frozenset[int]()
        self._asked_at: float | None = None

    def patience(self, states: Sequence[RequestState], missed: Sequence[int]) -> Patience:
        self._asked_at = self._now()
        self._asked = self._bounded() if missed and self._decide(states, missed) else NO_PATIENCE
        self._asked_rows = frozenset(missed)
        return self._asked

    def parts(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[list[Part]]:
        misses = [not len(tree) for tree in found]
        if self._asked_at is not None:
            left = sum(
                miss and state.takes_from(DraftSource.DRAFT_MODEL)
                for state, miss in zip(states, misses, strict=True)
            )
            self._learn_wait(self._now() - self._asked_at, left)
        parts = super().parts(states, found)
        kinds = [
            MISSED if miss else WAITED if row in self._asked_rows else HIT for row, miss in enumerate(misses)
        ]
        steps = {
            state: _LastStep(kind, kind != MISSED or any(len(part.tree) for part in of))
            for state, kind, of in zip(states, kinds, parts, strict=True)
            if state.takes_from(DraftSource.DRAFT_MODEL)
        }
        self._learn_what_follows(steps)
        self._last = steps
        self._asked_at = None
        return parts

    def step_took(self, seconds: float) -> None:
        """A prefill is no part of a step: what it takes is not saved by drafts."""
        self._steps.append(seconds)

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            last = self._last.get(outcome.request)
            if last is None or last.heard:
                continue
            last.heard = True
            learned = self._learned(outcome.request.tenant)
            learned.any.add(len(outcome.tokens))
            if last.drafted == (len(outcome.tree) > 0):  # else it was not verified
                learned.tokens[last.kind].add(len(outcome.tokens))

    def _decide(self, states: Sequence[RequestState], missed: Sequence[int]) -> bool:
        """Whether to wait."""
        self._decisions += 1
        if not self._in_time:
            return True
        of_missed = [self._learned(states[row].tenant) for row in missed]
        known = [learned for learned in of_missed if learned.knows_enough]
        if not (known and self._steps):
            return False
        seconds, tokens = (
            median(self._in_time),
            sum(self._learned(state.tenant).any.value for state in states),
        )
        rate = tokens / (median(self._steps) + self._waited.value)
        worth = worth_waiting(sum(learned.gain() for learned in known), seconds, rate)
        return worth != self._probes(seconds)

    def _learn_what_follows(self, steps: Mapping[RequestState, _LastStep]) -> None:
        for state, step in steps.items():
            if state in self._last:
                self._learned(state.tenant).hit_next[self._last[state].kind].add(step.kind == HIT)

    def _probes(self, seconds: float) -> bool:
        """Whether this decision is only taken to measure. seconds: that the wait would take."""
        if self._decisions < PROBE or seconds > PROBE_SHARE * (self._now() - self._probed_at):
            return False
        self._decisions, self._probed_at = 0, self._now()
        return True

    def _bounded(self) -> Patience:
        longest, nodes = self._patience
        return Patience(min(longest, GRACE * median(self._in_time)) if self._in_time else longest, nodes)

    def _learn_wait(self, seconds: float, misses: int) -> None:
        """Learns how long a speculation just in time takes. A wait that ends early and brings nothing says that the draft side is down,
        not how fast it is.

        misses: number of misses that are left after the wait.
        """
        self._waited.add(seconds)
        if not self._asked.seconds:
            return
        if seconds >= self._asked.seconds:  # what was not there in time would have taken longer
            self._in_time.append(GRACE * seconds)
        elif misses < len(self._asked_rows):
            self._in_time.append(seconds)


def _mean() -> RunningMean:
    return RunningMean(RATE, alike=round(1 / RATE))


class _Learned:
    """What the steps of one tenant's requests have brought."""

    def __init__(self) -> None:
        self.tokens = {kind: _mean() for kind in Kind}  # of a step
        self.hit_next = {kind: _mean() for kind in Kind}  # how often a hit follows
        self.any = _mean()  # tokens a step

    @property
    def knows_enough(self) -> bool:
        """Whether a gain can be told."""
        drafted = self.tokens[HIT].count + self.tokens[WAITED].count
        return self.tokens[MISSED].count >= ENOUGH and drafted > 0

    def gain(self) -> float:
        """Tokens that a request has of a speculation just in time over the fallback's, in this step and in those after it.

        What follows is more often a hit than after the fallback's tree, and less often than after a hit. With `more` such tokens of a
        hit over a miss: more = hit - missed + (hits after a hit - hits after a miss) more.
        """
        after = {kind: mean.value for kind, mean in self.hit_next.items()}
        best = HIT if self.tokens[HIT].count else WAITED
        hit, missed = self.tokens[best].value, self.tokens[MISSED].value
        more = (hit - missed) / max(LEAST, 1 - (after[HIT] - after[MISSED]))
        waited = self.tokens[WAITED].from_prior(hit, WAIT_PRIOR)
        return (
            waited
            - missed
            + (self.hit_next[WAITED].from_prior(after[HIT], WAIT_PRIOR) - after[MISSED]) * more
        )
