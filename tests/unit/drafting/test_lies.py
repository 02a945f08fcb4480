"""A draft side that says anything: no wrong token, no invalid tree, what is dropped is counted, time and memory are bounded."""

import itertools
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sglang_patches.draft_side.side import STALE, DraftParts, DraftSide, Learner
from sglang_patches.drafting import channel as channels
from sglang_patches.drafting.cache import DROPPED, SpeculationCache
from sglang_patches.drafting.channel import ProcessChannel
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.exchange import trie as speculation_trie
from sglang_patches.exchange.messages import Growth, Lost, Opened, Verifying
from sglang_patches.exchange.trie import ROOT
from sglang_patches.ledger.usage import DRAFT_MODEL
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
from tests.support.agreeing_model import VOCABULARY, model, target
from tests.support.draft_side import FunctionModel, InProcessDraftSide
from tests.unit.drafting.test_speculation import Run

REPOSITORY = Path(__file__).parents[3]
REASONS = ("epoch", "full", "gap", "invalid", "parent", "replay", "session")
KINDS = np.int64, np.int64, np.int32, np.float32


def dropped():
    return {reason: DROPPED.labels(reason)._value.get() for reason in REASONS}


def unseen(before):
    """Reasons that have not been counted since. A trie is rarely full."""
    return {reason for reason, count in dropped().items() if count == before[reason]} - {"full"}


def growth(nodes, parents, tokens, probabilities, turn=0, epoch=1):
    arrays = zip((nodes, parents, tokens, probabilities), KINDS, strict=True)
    return Growth("s", epoch, turn, *(np.array(values, kind) for values, kind in arrays))


@pytest.fixture
def cache():
    cache = SpeculationCache(VOCABULARY)
    cache.open("s", 3)
    return cache


def tokens_below(cache):
    tree = cache.subtree("s", 100, 10, DRAFT_MODEL)
    tree.check_integrity()
    return sorted(tree.tokens.tolist())


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "wrong",
    [
        ([2, 3], [0, 0], [6, 7], [0.5]),
        ([2], [0, 0], [6], [0.5]),
        ([2], [0], [-1], [0.5]),
        ([2], [0], [VOCABULARY], [0.5]),
        ([2], [0], [6], [NAN]),
        ([2], [0], [6], [-0.1]),
        ([0], [1], [6], [0.5]),  # the root below its child
        ([-1], [0], [6], [0.5]),  # the worker's
        ([1], [0], [6], [0.5]),  # another node's
        ([1], [1], [6], [0.5]),
        ([2**63 - 1], [0], [6], [0.5]),  # the next one would be no int64
    ],
)
def test_nodes_that_cannot_be_right_are_dropped_and_counted(cache, wrong):
    assert cache.grow(growth([1], [0], [5], [0.9]))
    before = dropped()["invalid"]
    assert cache.grow(growth(*wrong, turn=1))
    assert dropped()["invalid"] - before == max(map(len, wrong))
    assert tokens_below(cache) == [5]
    assert cache.grow(growth([9], [1], [8], [INFINITE], turn=2)) and tokens_below(cache) == [5, 8]


def test_what_comes_twice_changes_nothing(cache):
    before = dropped()
    for turn in range(3):
        cache.grow(growth([1, 2, 3], [0, 1, 0], [5, 6, 5], [0.9, 0.5, 0.4], turn=turn))
    assert tokens_below(cache) == [5, 6] and dropped() == before


@pytest.mark.parametrize("tokens", [range(VOCABULARY), [5] * VOCABULARY], ids=["other", "the same"])
def test_a_trie_has_a_limit(cache, tokens, monkeypatch):
    monkeypatch.setattr(speculation_trie, "MOST_NODES", 20)
    before, nodes = dropped()["full"], range(1, VOCABULARY + 1)
    cache.grow(growth(nodes, [0] * VOCABULARY, tokens, [0.5] * VOCABULARY))
    assert dropped()["full"] - before == VOCABULARY - 20
    cache.advance("s", 3, np.array([5], np.int32))
    assert cache.grow(growth([1000], [6 if tokens[0] == 0 else 1], [8], [0.5], turn=1)) and tokens_below(
        cache
    ) == [8]


class Repeating(DraftChannel):
    """Has always lost all sessions, and says so many times. epoch: of the messages that it says it could not take."""

    def __init__(self, epoch=1 << 40):
        self.epoch, self.opened, self._known = epoch, 0, set()

    def post(self, messages):
        found = [message for message in messages if isinstance(message, Opened)]
        self.opened += len(found)
        self._known |= {message.session for message in found}

    def collect(self, seconds):
        return [Lost(session, self.epoch) for session in self._known] * 10

    def close(self):
        pass


def test_a_session_is_opened_again_once_a_step():
    channel = Repeating()
    run = Run(channel, requests=2)
    opened = channel.opened
    run.tokens_a_step(10)
    assert channel.opened - opened == 20


def test_what_was_lost_before_a_session_was_told_again_is_not_told_once_more():
    """The draft side says of each message that it could not take it, also of those that were on their way when the text was sent."""
    channel = Repeating(epoch=1)
    Run(channel, requests=1).tokens_a_step(10)
    assert channel.opened == 2


def test_numbers_that_two_openings_gave_do_not_make_a_circle():
    """A repeated `Opened` makes the draft side number its nodes again, and the worker still has the first numbers."""
    side = DraftSide(
        FunctionModel(model(1.0)), DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(4))), 8, 8
    )
    text = np.arange(3, dtype=np.int32)
    side.hear([Opened("s", text, 1)])
    (first,) = side.work()
    (second,) = side.work()
    above, below = int(first.nodes[0]), int(second.nodes[0])
    assert int(second.parents[0]) == above
    turned = [np.array([below, above]), np.array([ROOT, below])]
    before = STALE._value.get()
    assert side.hear([Verifying("s", 1, *turned, np.array([1, 2], np.int32))]) == []
    assert STALE._value.get() == before + 1
    while side.work():
        pass
    assert side._drafts["s"].trie.path(below) == [above, below]


@pytest.fixture
def liar(tmp_path):
    """The channel to a real process."""
    Run(InProcessDraftSide(model(1.0))).tokens_a_step(5)  # compiles what a step needs
    command = [sys.executable, "-m", "tests.support.draft_programs", "lying", str(VOCABULARY), "1"]
    channel = ProcessChannel(command, {"PYTHONPATH": str(REPOSITORY)}, tmp_path / "draft.log")
    yield channel
    channel.close()


STEPS = 300


def steps_of(run, clock):
    """The seconds by this clock of each step, without end."""
    draw = random.Random(1)
    while True:
        began = clock()
        run.commit(run.step())
        yield clock() - began
        time.sleep(draw.choice([0.0, 0.0, 0.002]))  # the target's forward


def test_lies_at_a_high_rate(liar):
    """Several sessions. `Run` checks each tree, and emits what the target says. A step's work is bounded."""
    before, run = dropped(), Run(liar, requests=4)
    worked, limit = [], time.monotonic() + 60
    for seconds in steps_of(run, time.thread_time):
        worked.append(seconds)
        with liar._changed:
            assert liar._answers._size <= channels.MOST
        assert all(
            len(run.speculation._cache.trie(req.rid)) <= speculation_trie.MOST_NODES for req in run.reqs
        )
        if len(worked) >= STEPS and not (unseen(before) and time.monotonic() < limit):
            break
    for text in run.texts:
        assert all(text[at] == target(text[:at]) for at in range(3, len(text)))
    assert not unseen(before)
    assert statistics.median(worked) < 0.2 and max(worked) < 2.0, sorted(worked)[-5:]


@pytest.mark.clock
def test_lies_hold_no_step_up(liar):
    passed = sorted(itertools.islice(steps_of(Run(liar, requests=4), time.monotonic), STEPS))
    assert statistics.median(passed) < 0.2 and passed[-1] < 2.0, passed[-5:]
