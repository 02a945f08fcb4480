"""What happens after a miss (section 4.3): the step waits for a speculation just in time, or another drafter answers at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from statistics import median
from typing import TYPE_CHECKING

from datastore_service.protocol.tree import DraftTree
from sglang_patches.drafting.fallback import NO_PATIENCE, Fallback, NoFallback, Patience
from sglang_patches.ledger.rates import RunningMean, per_tenant

if TYPE_CHECKING:
    from sglang_patches.ledger.outcome import Outcome
    from sglang_patches.ledger.requests import RequestState

LONGEST_WAIT = 1.0  # seconds
RATE = 0.01  # of a running mean
ENOUGH = 64  # of the fallback's trees, before a step may wait in place of one
RECENT, FEW = 9, 3  # times that a median is taken of: of steps, of waits
# One step in so many with a miss does the other thing, so that both stay measured. Waits for that take 1% of the time at most.
PROBE, PROBE_SHARE = 32, 0.01
PRIOR = 8  # waits, until which one is believed to be as good as a hit
LEAST = 0.05  # of a probability that is divided by
GRACE = 2.0  # a speculation just in time is waited for so many times as long as one takes


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

    def trees(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[DraftTree]:
        return self._other.trees(states, found)

    def patience(self, states: Sequence[RequestState], missed: Sequence[int]) -> Patience:
        return self._patience if missed else NO_PATIENCE


class SaguaroFallback(WaitingFallback):
    """Waits in the steps where that is worth it, by what it has measured. now: seconds by a steady clock."""

    def __init__(
        self, other: Fallback, lookahead: int, longest: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(other, lookahead, longest)
        self._now = now
        self._learned = per_tenant(_Learned)
        self._kinds: dict[RequestState, Kind] = {}  # of the last step
        self._waited = _mean()  # seconds a step
        self._steps: deque[float] = deque(maxlen=RECENT)  # seconds of each, without waiting
        self._in_time: deque[float] = deque(maxlen=FEW)  # seconds that a speculation took
        self._decisions, self._probed_at = 0, 0.0
        self._asked, self._asked_rows = NO_PATIENCE, frozenset[int]()
        self._asked_at: float | None = None
        # What each request's tree is, and whether one was made for it.
        self._expected: dict[RequestState, tuple[Kind, bool]] = {}

    def patience(self, states: Sequence[RequestState], missed: Sequence[int]) -> Patience:
        self._asked_at = self._now()
        self._asked = self._bounded() if missed and self._decide(states, missed) else NO_PATIENCE
        self._asked_rows = frozenset(missed)
        return self._asked

    def trees(self, states: Sequence[RequestState], found: Sequence[DraftTree]) -> list[DraftTree]:
        misses = [not len(tree) for tree in found]
        if self._asked_at is not None:
            left = sum(miss and not state.plain_reason for state, miss in zip(states, misses, strict=True))
            self._learn_wait(self._now() - self._asked_at, left)
        trees = super().trees(states, found)
        kinds = [
            MISSED if miss else WAITED if row in self._asked_rows else HIT for row, miss in enumerate(misses)
        ]
        of = [(state, kind) for state, kind in zip(states, kinds, strict=True) if not state.plain_reason]
        self._learn_what_follows(of)
        self._expected = {
            state: (kind, kind != MISSED or len(tree) > 0)
            for state, kind, tree in zip(states, kinds, trees, strict=True)
            if not state.plain_reason
        }
        self._asked_at = None
        return trees

    def step_took(self, seconds: float) -> None:
        """A prefill is no part of a step: what it takes is not saved by drafts."""
        self._steps.append(seconds)

    def heard(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.request not in self._expected:
                continue
            kind, drafted = self._expected.pop(outcome.request)
            learned = self._learned(outcome.request.tenant)
            learned.any.add(len(outcome.tokens))
            if drafted == (len(outcome.tree) > 0):  # else it was not verified
                learned.tokens[kind].add(len(outcome.tokens))

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

    def _learn_what_follows(self, kinds: Sequence[tuple[RequestState, Kind]]) -> None:
        for state, kind in kinds:
            if state in self._kinds:
                self._learned(state.tenant).hit_next[self._kinds[state]].add(kind == HIT)
        self._kinds = dict(kinds)

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
        waited = self.tokens[WAITED].from_prior(hit, PRIOR)
        return waited - missed + (self.hit_next[WAITED].from_prior(after[HIT], PRIOR) - after[MISSED]) * more
