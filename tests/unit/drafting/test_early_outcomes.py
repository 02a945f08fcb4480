"""Outcomes that a courier brings before the worker reads them: whatever the order of things, both sides know the same text."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_patches.drafting.speculation import EARLY
from sglang_patches.exchange.messages import Closed, Committed, Opened
from tests.support.agreeing_model import model
from tests.support.draft_side import InProcessDraftSide
from tests.unit.drafting.lagging import Lagging

EXAMPLES = 15 * int(os.environ.get("SPECSTORE_FUZZ", "1"))
EVENTS = ("kill", "away", "retract", "ends", "finish")


class Checked(Lagging):
    """The draft side hears at once: after a look-up it has the very text."""

    def check(self, rows, states):
        super().check(rows, states)
        for row, state in zip(rows, states, strict=True):
            draft = self.side._side._drafts.get(state.session)
            if draft is not None and state.session in self.speculation._cache:
                assert draft.text.after(0).tolist() == self.texts[row]
                assert draft.trie.epoch == self.speculation._cache.trie(state.session).epoch


class Courier:
    """Tells what it was given, at each moment between two things with this chance."""

    def __init__(self, chance, draw):
        self.chance, self.draw = chance, draw
        self.parcels = []

    def __call__(self, flight, emitted):
        self.parcels.append((flight, [np.array(tokens, np.int32) for tokens in emitted]))

    def tell(self, run):
        while self.parcels and self.draw.random() < self.chance:
            run.speculation.outcomes_ahead(*self.parcels.pop(0))


def make_run(chance, agreement=1.0, seed=0, chances=(), side=None, **options):
    """chance: that the courier tells at a moment."""
    courier = Courier(chance, None)
    side = side or InProcessDraftSide(model(agreement, seed))
    run = Checked(side, courier, seed=seed, chances=chances, between=lambda: None, **options)
    courier.draw = run.draw
    run.between = lambda: courier.tell(run)
    return run


def early(result):
    return EARLY.labels(result)._value.get()


@settings(max_examples=EXAMPLES)
@given(
    st.fixed_dictionaries({event: st.sampled_from([0.0, 0.05, 0.3]) for event in EVENTS}),
    st.sampled_from([0.02, 0.2, 0.6, 1.0]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.6, 1.0]),
)
def test_both_sides_know_the_same_text(chances, chance, seed, agreement):
    run = make_run(chance, agreement, seed, chances)
    run.run(40)
    run.chances = {}
    run.run(10)
    running, speculation = set(run.book._states.values()), run.speculation
    assert {session.state for session in speculation._sessions.values()} <= running
    if agreement == 1.0:
        assert run.run(15) > 2.2


@pytest.mark.parametrize("agreement", [0.0, 0.6, 1.0])
def test_drafts_are_as_good_as_without_a_courier(agreement):
    gains = [make_run(chance, agreement).run(60) for chance in (0.0, 1.0)]
    assert gains[1] == pytest.approx(gains[0], rel=0.15)


def test_the_draft_side_hears_of_an_outcome_before_the_next_step_and_once():
    run = make_run(1.0)
    told, seen = early("told"), run.side.seen
    for _ in range(10):
        count = len(seen)
        run.step()
        assert isinstance(seen[-1], Committed) and len(seen) > count
    starts = [(message.session, message.start) for message in seen if isinstance(message, Committed)]
    assert len(starts) == len(set(starts)) and early("told") - told == 30


def test_what_comes_after_the_worker_has_read_it_is_too_late():
    run = make_run(0.0)
    parcels = run.tell.parcels
    for _ in range(6):
        run.step()
    late, seen = early("late"), list(run.side.seen)
    for parcel in parcels[:-1]:
        run.speculation.outcomes_ahead(*parcel)
    assert early("late") - late == 15 and run.side.seen == seen


def test_a_step_that_was_told_and_dropped_opens_the_session_again():
    run = make_run(1.0, requests=1)
    run.run(4)
    assert isinstance(run.side.seen[-1], Committed)
    text = run.texts[0][: len(run.texts[0]) - len(run.pending[0])]
    run._prefilled(0, text, (run.pending[0][0] + 1) % 100)
    expected, count = list(run.texts[0]), len(run.side.seen)
    run.step()
    (opened,) = [message for message in run.side.seen[count:] if isinstance(message, Opened)]
    assert opened.tokens.tolist() == expected
    run.run(3)
    assert run.run(8) > 2.5


def test_a_request_that_is_over_is_closed_ahead():
    run = make_run(1.0, requests=1)
    run.run(3)
    (state,) = run.book._states.values()
    state.ends = frozenset(range(100))
    run.step()
    assert isinstance(run.side.seen[-1], Closed)
    count = len(run.side.seen)
    run.step()  # SGLang's step too many
    assert len(run.side.seen) == count


def test_the_parcel_of_a_request_that_has_ended_is_not_the_next_one_s():
    """Of the same name, and as long."""
    run = make_run(0.0, requests=1)
    run.run(3)
    flight, emitted = run.tell.parcels[-1]
    (state,) = flight.states
    run.speculation.close([run.book.close("r0")])
    run.reqs[0].output_ids = run.reqs[0].output_ids[:0]
    run.reqs[0].origin_input_ids = run.reqs[0].origin_input_ids[:0]
    run.reqs[0].origin_input_ids.extend(state.text.between(0, flight.starts[0]).tolist())
    run.speculation.open(run.book.open(run.reqs))
    count = len(run.side.seen)
    run.speculation.outcomes_ahead(flight, emitted)
    assert len(run.side.seen) == count
