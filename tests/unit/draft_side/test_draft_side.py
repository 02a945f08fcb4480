"""Whose rows a draft forward has: no session goes without, however many there are."""

import collections

import numpy as np
import pytest

from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.exchange.messages import Committed, Growth, Opened, Verifying
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.double import AllAccepted
from sglang_patches.methods.duo import Heads
from sglang_patches.methods.mirror import ExpectedOutcomes
from sglang_patches.methods.planner import LikeliestOutcomes
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
from tests.support.agreeing_model import VOCABULARY, model, target
from tests.support.draft_side import FunctionModel

ROWS, NODES = 24, 15
NONE = np.empty(0, np.int64)
PREDICTORS = [GeometricFanOut, LikeliestOutcomes, ExpectedOutcomes, AllAccepted, Heads]


class Batch:
    """Sessions whose verified trees are another drafter's: chains that the target accepts one token of. seen: growth, by session."""

    def __init__(self, predictor, sessions):
        parts = DraftParts(lambda: Learner(predictor(), Rollouts(4)))
        self.side = DraftSide(FunctionModel(model(0.8)), parts, ROWS, ROWS)
        self.texts = {f"s{at}": [1, 2, at] for at in range(sessions)}
        for session, text in self.texts.items():
            self.side.hear([Opened(session, np.array(text, np.int32), 1)])
        self.seen = collections.Counter()
        self.epoch = 1

    def step(self, rounds):
        """A verification of all sessions, in whose time the draft side has so many rounds."""
        self.seen.clear()
        for session, text in self.texts.items():
            self.side.hear([self._verifying(session, text)])
        for _ in range(rounds):
            for answer in self.side.work() or ():
                self.seen[answer.session] += isinstance(answer, Growth) and len(answer.nodes)
        self.epoch += 1
        for session, text in self.texts.items():
            emitted = np.array([target(text), (target([*text, target(text)]) + 9) % VOCABULARY], np.int32)
            self.side.hear([Committed(session, len(text), emitted, self.epoch)])
            text += emitted.tolist()

    def _verifying(self, session, text):
        right = target(text)
        tokens = [right, *((right + at) % VOCABULARY for at in range(1, NODES))]
        nodes = -1 - np.arange(NODES)
        return Verifying(session, self.epoch, nodes, np.append(0, nodes[:-1]), np.array(tokens, np.int32))


@pytest.mark.parametrize("sessions", [16, 32])
@pytest.mark.parametrize("predictor", PREDICTORS)
def test_every_session_has_guesses_in_every_step(predictor, sessions):
    """In as many forwards as it takes to run each session's root, and as many again to go on to the end of a guess."""
    batch = Batch(predictor, sessions)
    for _ in range(5):
        batch.step(rounds=2 * -(-sessions // ROWS) + 1)
        assert all(batch.seen[session] for session in batch.texts)


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_in_one_forward_a_step_the_sessions_take_turns(predictor):
    """Half of the sessions have a row in it. Those that had none have one in the next."""
    batch, run = Batch(predictor, 2 * ROWS), []
    forward = batch.side._model.forward
    batch.side._model.forward = lambda rows: (run.append({row.draft.session for row in rows}), forward(rows))[
        1
    ]
    for _ in range(6):
        batch.step(rounds=1)
    assert all(len(sessions) == ROWS for sessions in run)
    assert all(before.isdisjoint(after) for before, after in zip(run, run[1:], strict=False))


@pytest.mark.parametrize(("sessions", "each"), [(1, ROWS), (5, ROWS // 5), (2 * ROWS, 1)])
def test_the_sessions_share_the_guesses(sessions, each):
    asked = set()

    class Noting(GeometricFanOut):
        def predict(self, draft, budget):
            asked.add(budget)
            return super().predict(draft, budget)

    Batch(Noting, sessions).step(rounds=1)
    assert asked == {each}


class Verifications(SpeedRatio):
    def __init__(self):
        super().__init__()
        self.told = 0

    def verification_took(self, seconds):
        self.told += 1


def one_session(ratio=None):
    side = DraftSide(
        FunctionModel(model(1.0)),
        DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(4)), ratio=ratio),
        ROWS,
        ROWS,
    )
    side.hear([Opened("s", np.array([1, 2, 3], np.int32), 1)])
    return side


def commit(side, start, count=1, epoch=1):
    """Tokens that the trie has, if it has any."""
    (draft,) = side._drafts.values()
    text, tokens = draft.text.after(0).tolist(), []
    for _ in range(count):
        tokens.append(target(text + tokens))
    side.hear([Committed("s", start, np.array(tokens, np.int32), epoch)])


def test_a_verification_is_timed_once():
    """Further commits before the next one say nothing of it."""
    ratio = Verifications()
    side = one_session(ratio)
    while side.work() is not None:
        pass
    side.hear([Verifying("s", 1, NONE, NONE, NONE.astype(np.int32))])
    commit(side, 3)
    commit(side, 4)
    assert ratio.told == 1


def test_a_session_that_is_verified_no_more_is_not_drafted_for():
    """Two commits without a verification between them: the target does without drafts."""
    side = one_session()
    while side.work() is not None:
        pass
    commit(side, 3)
    assert side.work() is not None
    while side.work() is not None:
        pass
    commit(side, 4)
    assert side.work() is None
    side.hear([Verifying("s", 1, NONE, NONE, NONE.astype(np.int32))])
    assert side.work() is not None
