"""The choice between waiting for the draft side and falling back, on a clock of the test's own."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE
from sglang_patches.drafting.seams import Fallback, NoFallback
from sglang_patches.drafting.union import Part, first_trees
from sglang_patches.ledger.outcome import Outcome
from sglang_patches.methods.saguaro import (
    ENOUGH,
    PROBE,
    SaguaroFallback,
    WaitingFallback,
    worth_waiting,
)
from tests.unit.drafting.texts import make_tree

LOOKAHEAD, LONGEST = 4, 0.5
CHAIN = make_tree([1, 2, 3, 4], [-1, 0, 1, 2])


@pytest.mark.parametrize("missed", [1.0, 1.5, 2.5, 3.5])
@pytest.mark.parametrize("hit_rate", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_worth_waiting_prefers_theorem_17_s_rule(hit_rate, missed, batch):
    """With the means of a step, whichever rule the rate was measured with."""
    hit, speculation = 4.0, 0.6
    some_miss = 1 - hit_rate**batch
    waiting = batch * hit / (1 + some_miss * speculation)
    falling_back = batch * (hit_rate * hit + (1 - hit_rate) * missed)
    gain, wait = batch * (1 - hit_rate) * (hit - missed), some_miss * speculation
    for rate in (waiting, falling_back):
        assert worth_waiting(gain, wait, rate) is (waiting > falling_back)


def found_of(misses):
    return [EMPTY_TREE if miss else CHAIN for miss in misses]


class AtOnce(Fallback):
    """A tree for every miss."""

    def parts(self, states, found):
        return [[] if len(tree) else [Part(CHAIN)] for tree in found]


@dataclass(eq=False)
class State:
    plain_reason: str | None = None
    tenant: str = "acme"  # "" would not show what is learned of nobody

    def takes_from(self, source):
        return not self.plain_reason


@dataclass
class Load:
    """What the fallback measures. Times in seconds."""

    fallback: SaguaroFallback
    clock: SimpleNamespace
    hit: int = 4  # tokens
    missed: int = 2
    step: float = 0.1
    between: float = 0.0  # that something else runs between two steps
    in_time: float = 0.03
    batch: int = 1
    down: bool = False

    def __post_init__(self):
        self.states = [State() for _ in range(self.batch)]

    def waits(self, steps, misses=1, verified=True):
        """The seconds waited of each step. Of the batch so many are missed."""
        found = []
        for _ in range(steps):
            seconds, nodes = self.fallback.patience(self.states, range(misses))
            assert not seconds or nodes == LOOKAHEAD
            found.append(min(seconds, self.in_time) if misses and not self.down else 0.0)
            self.clock.now += found[-1]
            here = not misses or (seconds >= self.in_time and not self.down)
            mask = [not here and row < misses for row in range(self.batch)]
            parts = self.fallback.parts(self.states, found_of(mask))
            self.fallback.step_took(self.step)
            self.clock.now += self.step + self.between
            outcomes = []
            for state, tree, miss in zip(self.states, first_trees(parts), mask, strict=True):
                tokens = np.zeros(self.missed if miss else self.hit, np.int32)
                tree = (tree if miss else CHAIN) if verified else EMPTY_TREE
                outcomes.append(Outcome(state, 0, tokens if verified else tokens[:1], tree, None, ()))
            self.fallback.heard(outcomes)
        return np.array(found)


def make_load(other=None, **facts):
    clock = SimpleNamespace(now=0.0)
    fallback = SaguaroFallback(other or AtOnce(), LOOKAHEAD, LONGEST, lambda: clock.now)
    return Load(fallback, clock, **facts)


# E_hit 4, a step 0.1 s: waiting 0.03 s costs at most 0.3 of a step's tokens.
CASES = [
    ("a miss costs more than the wait", {"missed": 1}, True),
    ("a miss costs less than the wait", {"missed": 3, "in_time": 0.06}, False),
    ("the draft side is too slow", {"missed": 1, "in_time": 0.4}, False),
    ("the others of the batch would wait", {"missed": 1, "in_time": 0.06, "batch": 8}, False),
    ("all of the batch are missed", {"missed": 1, "in_time": 0.06, "batch": 8, "misses": 8}, True),
    ("the fallback is as good", {"missed": 4}, False),
    ("a prefill comes before every step", {"missed": 3, "in_time": 0.06, "between": 1.0}, False),
]


@pytest.mark.parametrize(("facts", "waits"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_waits_where_that_is_worth_it(facts, waits):
    facts = dict(facts)
    misses = facts.pop("misses", 1)
    load = make_load(**facts)
    for _ in range(ENOUGH + 2):
        load.waits(9, misses=0)
        load.waits(1, misses)
    waited = 0
    for _ in range(2 * PROBE):
        load.waits(9, misses=0)
        waited += load.waits(1, misses)[0] > 0
    assert waited >= 2 * PROBE - 2 if waits else 1 <= waited <= 2


@pytest.mark.parametrize("follow", [True, False], ids=["hits follow a wait", "no matter"])
def test_it_waits_for_the_hits_that_follow_too(follow):
    """A miss alone costs less than the wait. Nine hits follow a wait, and misses the fallback's tree, or hits both."""
    load, waited = make_load(missed=3, in_time=0.001), []
    load.waits(2 * ENOUGH)
    for cycle in range(20 * PROBE):
        waited.append(load.waits(1)[0] > 0)
        load.waits(9, misses=int(follow and not waited[-1]))
        load.in_time = 0.1 if cycle > 10 * PROBE else 0.001
    assert np.mean(waited[-2 * PROBE :]) > 0.9 if follow else np.mean(waited[-2 * PROBE :]) < 0.1


def test_steps_without_misses_never_wait():
    load = make_load(missed=1)
    load.waits(10)
    assert not load.waits(20, misses=0).any()


def test_a_dead_draft_side_is_waited_for_a_few_times_and_never_longer_than_allowed():
    load = make_load(missed=1)
    load.waits(2 * ENOUGH)
    load.in_time = 1e9
    waits = load.waits(200)
    assert waits.max() <= LONGEST
    assert (waits > 0).sum() <= 4
    load.waits(5000)
    assert load.waits(5000).mean() < 0.01 * (load.step + LONGEST)  # of the time at most
    load.in_time = 0.03
    load.waits(4000)
    assert (load.waits(PROBE) > 0).sum() >= PROBE - 1  # it is waited for again


def test_what_ends_a_wait_at_once_because_the_draft_side_is_down_is_no_measurement():
    load = make_load(missed=1)
    load.waits(2 * ENOUGH)
    load.down = True
    load.waits(50)
    load.down = False
    assert (load.waits(10) == load.in_time).all()


def test_a_request_that_gets_no_drafts_hides_no_speculation():
    load = make_load(missed=1, batch=2)
    load.states[1].plain_reason = "penalties"
    fallback, clock = load.fallback, load.clock
    fallback.patience(load.states, [1])
    clock.now += load.in_time
    fallback.parts(load.states, found_of([False, True]))
    assert (
        fallback.patience(load.states, [1]).seconds == 0
    )  # it waits no further time to learn how long a speculation takes


def test_it_follows_what_the_fallback_gives():
    load = make_load(missed=4)
    load.waits(2 * ENOUGH)
    load.missed = 1
    load.waits(60 * PROBE)
    assert (load.waits(PROBE) > 0).sum() >= PROBE - 1


def test_trees_that_were_not_verified_do_not_count():
    load = make_load(missed=1)
    load.waits(2 * ENOUGH)
    load.waits(2000, verified=False)
    assert (load.waits(PROBE) > 0).sum() >= PROBE - 1


def test_nothing_to_fall_back_to_is_a_token_a_step():
    load = make_load(NoFallback(), missed=1)
    load.waits(2 * ENOUGH)
    assert load.waits(10).any()


def test_waiting_always():
    fallback = WaitingFallback(AtOnce(), LOOKAHEAD, LONGEST)
    assert fallback.patience([None] * 8, [1, 2, 3]) == (LONGEST, LOOKAHEAD)
    assert fallback.patience([None] * 8, []).seconds == 0
    assert fallback.parts([None, None], found_of([True, False])) == [[Part(CHAIN)], []]


def test_what_a_tenant_s_steps_brought_is_that_tenant_s_alone():
    """One whose misses gain by waiting does not make another wait, of whom nothing is known."""
    load = make_load(missed=1, batch=2)
    load.waits(2 * ENOUGH)
    assert load.waits(10).any()
    for state in load.states:
        state.tenant = "another"
    assert not load.waits(ENOUGH // 2 - 1).any()
    load.waits(ENOUGH)
    assert load.waits(10).any()
