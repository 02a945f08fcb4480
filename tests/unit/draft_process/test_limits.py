"""What the draft model cannot take of a text: a draft side over SGLang's model (its runner is replaced) goes on for the other sessions."""

import logging

import numpy as np
import pytest

pytest.importorskip("sglang")

from sglang_patches.draft_process import model as process_model  # noqa: E402
from sglang_patches.draft_process.limits import NOT_TAKEN  # noqa: E402
from sglang_patches.draft_process.model import SglangModel  # noqa: E402
from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner  # noqa: E402
from sglang_patches.exchange.messages import Closed, Committed, Growth, Lost, Opened, Verifying  # noqa: E402
from sglang_patches.methods.saguaro import (
    GeometricFanOut,  # noqa: E402
    Rollouts,  # noqa: E402
)
from tests.unit.draft_process.test_model import CHUNK, CONTEXT, ROWS, VOCABULARY, Runner  # noqa: E402
from tests.unit.draft_process.test_sequences import SLOTS  # noqa: E402

TARGETS = VOCABULARY + 5  # token ids of the target
FINE = [1, 2, 3]
REFUSED = {"length": [1] * (CONTEXT + 1), "token": [1, VOCABULARY, 2]}


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(process_model.host, "place_kv", lambda runner, batch: None)
    return SglangModel(Runner(), ROWS, CHUNK, TARGETS)


@pytest.fixture
def side(model):
    return DraftSide(model, DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(4))), ROWS, ROWS)


def opened(session, tokens):
    return Opened(session, np.array(tokens, np.int32), 0)


def worked(side):
    """Sessions that got drafts, until there is nothing to do."""
    found = set()
    for _ in range(200):
        answers = side.work()
        if answers is None:
            return found
        found |= {answer.session for answer in answers if isinstance(answer, Growth)}
    raise AssertionError("it never comes to an end")


def counted(reason):
    return NOT_TAKEN.labels(reason)._value.get()


@pytest.mark.parametrize("reason", REFUSED)
def test_such_a_session_gets_no_drafts_and_others_do(side, model, caplog, reason):
    before = counted(reason)
    with caplog.at_level(logging.WARNING):
        side.hear([opened("a", REFUSED[reason]), opened("b", REFUSED[reason]), opened("fine", FINE)])
        assert worked(side) == {"fine"}
        assert worked(side) == set()
    assert counted(reason) == before + 2
    assert caplog.text.count("specstore: a text has") == 1
    side.hear([Closed("a"), Closed("b"), Closed("fine")])
    assert model._sequences.room == SLOTS


@pytest.mark.parametrize("reason", REFUSED)
def test_a_session_that_becomes_so_is_drafted_no_more_and_leaves_its_room(side, model, reason):
    """The worker hears that it is lost, and opens it again as one that the draft side never drafted for: no step waits for it."""
    before = counted(reason)
    side.hear([opened("a", FINE), opened("fine", FINE)])
    assert worked(side) == {"a", "fine"}
    with_both = model._sequences.room
    (lost,) = side.hear([Committed("a", len(FINE), np.array(REFUSED[reason], np.int32), 1)])
    assert isinstance(lost, Lost) and lost.session == "a"
    assert with_both < model._sequences.room
    assert counted(reason) == before
    again = [*FINE, *REFUSED[reason]]
    assert side.hear([opened("a", again), Committed("fine", len(FINE), np.array([5], np.int32), 1)]) == []
    assert "a" not in worked(side) and counted(reason) == before + 1
    assert side.hear([Committed("a", len(again), np.array([5], np.int32), 1)]) == []
    assert not side.waits_for_room
    side.hear([Closed("fine"), Closed("a"), opened("a", FINE)])
    assert worked(side) == {"a"}, "the same name again, of another text"
    side.hear([Closed("a")])
    assert model._sequences.room == SLOTS


def test_a_verified_token_that_the_draft_model_does_not_have_stops_nothing(side):
    """The datastore and the early exit propose the target's tokens."""
    side.hear([opened("a", FINE)])
    worked(side)
    nodes, tokens = np.array([-1, -2]), np.array([TARGETS - 1, 3], np.int32)
    side.hear([Verifying("a", 0, nodes, np.array([0, -1]), tokens)])
    assert worked(side) == {"a"}
    side.hear([Committed("a", len(FINE), np.array([TARGETS - 1, 3, 3], np.int32), 1)])
    assert worked(side) == set()
