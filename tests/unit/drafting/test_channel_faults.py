"""Decoding over a channel that loses, repeats, delays and reorders whole frames: no fault reaches the output, and drafts come back."""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.drafting.cache import DROPPED
from sglang_patches.drafting.seams import DraftChannel
from sglang_patches.exchange.messages import Opened
from sglang_patches.exchange.wire import answers_from_draft, frame_of, messages_from_worker
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
from tests.support.agreeing_model import model, target
from tests.support.draft_side import FunctionModel
from tests.unit.drafting.test_speculation import Run

EXAMPLES = 25 * int(os.environ.get("SPECSTORE_FUZZ", "1"))
FAULTS = ("loss", "repetition", "delay", "disorder")


class Line:
    """One direction. chances: of each fault, for a frame."""

    def __init__(self, chances, seed):
        self.chances, self._draw = chances, random.Random(seed)
        self._waiting = []

    def put(self, items):
        if items and not self._happens("loss"):
            self._waiting += [frame_of(items)] * (2 if self._happens("repetition") else 1)

    def take(self):
        late = [self._happens("delay") for _ in self._waiting]
        taken = [frame for frame, is_late in zip(self._waiting, late, strict=True) if not is_late]
        self._waiting = [frame for frame, is_late in zip(self._waiting, late, strict=True) if is_late]
        if self._happens("disorder"):
            self._draw.shuffle(taken)
        return taken

    def _happens(self, fault):
        return self._draw.random() < self.chances.get(fault, 0.0)


class FaultyChannel(DraftChannel):
    def __init__(self, chances, seed, chance_of_the_model):
        function = FunctionModel(model(chance_of_the_model, seed))
        self._side = DraftSide(function, DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(4))), 8, 8)
        self._there, self._back = Line(chances, seed), Line(chances, seed + 1)
        self._messages, self._answers = messages_from_worker(), answers_from_draft()
        self.posted = []

    def post(self, messages):
        self.posted += messages
        self._there.put(messages)

    def collect(self, seconds):
        for frame in self._there.take():
            self._back.put(self._side.hear(self._messages.feed(frame)))
        for _ in range(8):
            self._back.put(self._side.work() or [])
        return [answer for frame in self._back.take() for answer in self._answers.feed(frame)]

    def close(self):
        pass

    def heal(self):
        self._there.chances = self._back.chances = {}


def stale():
    return DROPPED.labels("epoch")._value.get()


@settings(max_examples=EXAMPLES)
@given(
    st.fixed_dictionaries({fault: st.sampled_from([0.0, 0.05, 0.3]) for fault in FAULTS}),
    st.integers(0, 2**32),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_faults_of_the_channel_change_no_token(chances, seed, agreement):
    channel, draw = FaultyChannel(chances, seed, agreement), random.Random(seed)
    run, redrawn = Run(channel, requests=3), 0
    for _ in range(40):
        emitted = run.step()
        if draw.random() < 0.05:  # the step is dropped, and another token drawn
            emitted = [[(target(text) + 3) % 100] for text in run.texts]
            redrawn += 1
        run.commit(emitted)
    channel.heal()
    run.tokens_a_step(10)
    opened = {
        message.session: message.tokens.tolist() for message in channel.posted if isinstance(message, Opened)
    }
    for req, text in zip(run.reqs, run.texts, strict=True):
        assert sum(text[at] != target(text[:at]) for at in range(3, len(text))) == redrawn
        assert text[: len(opened[req.rid])] == opened[req.rid]
    if agreement == 1.0:
        assert run.tokens_a_step(20) > 2


@pytest.mark.parametrize("fault", FAULTS)
def test_drafts_are_as_good_as_the_channel(fault):
    """Each fault costs something: it really happens. A repetition costs nothing."""
    whole, faulty = [Run(FaultyChannel({fault: chance}, 1, 1.0)).tokens_a_step(60) for chance in (0.0, 0.3)]
    assert faulty == whole if fault == "repetition" else 1.2 < faulty < whole


def test_growth_of_epochs_that_are_over_is_counted():
    before = stale()
    Run(FaultyChannel({}, 1, 1.0)).tokens_a_step(30)
    in_time = stale()
    Run(FaultyChannel({"delay": 0.5}, 1, 0.5)).tokens_a_step(30)
    assert in_time == before and stale() > in_time
