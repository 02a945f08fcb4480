"""What an early exit expects reaches the draft side, and is drafted for."""

import numpy as np
import pytest

from sglang_patches.draft_side.draft import Candidates
from sglang_patches.draft_side.side import STALE, DraftParts, Learner
from sglang_patches.drafting.speculation import Choices
from sglang_patches.exchange.messages import Expected, Verifying
from sglang_patches.exchange.trie import ROOT
from sglang_patches.methods.mirror import ExpectedOutcomes, choices_of
from sglang_patches.methods.planner import LikeliestOutcomes
from sglang_patches.methods.saguaro import Rollouts
from sglang_patches.verification.layout import pack
from tests.support.agreeing_model import VOCABULARY, model, target
from tests.support.draft_side import InProcessDraftSide, commit
from tests.unit.drafting.test_speculation import NODES, Run, lookups
from tests.unit.methods.saguaro.test_fan_out import make_draft

KAPPA = 4


def mirror_parts():
    return DraftParts(lambda: Learner(ExpectedOutcomes(), Rollouts(4)))


class Watched(Run):
    """An early exit whose first choices are wrong, and the third is the target's token. when: it is heard."""

    when = "under way"
    told = True

    def step(self):
        launched, outcomes = self.speculation.verification_launched, self.speculation.heard
        expect = self.speculation.expected

        def verification_launched(states):
            packed = pack([state.tree for state in states], NODES + 1)
            expected = states, packed, self.choices(packed)
            if self.when == "early":
                expect(*expected)
            launched(states)
            if self.when == "under way":
                expect(*expected)
            self.late = expected

        def heard(news):
            outcomes(news)
            if self.when == "late" and hasattr(self, "late"):
                expect(*self.late)

        self.speculation.verification_launched = verification_launched
        self.speculation.heard = heard
        try:
            return super().step()
        finally:
            self.speculation.verification_launched, self.speculation.heard = launched, outcomes

    def choices(self, packed):
        tokens = np.full((len(packed), NODES + 1, KAPPA), 0, np.int32)
        for request, (text, (nodes, parents)) in enumerate(zip(self.texts, packed, strict=True)):
            paths = [text]
            for token, parent in zip(nodes.tolist(), parents.tolist(), strict=True):
                paths.append([*paths[max(parent, -1) + 1], token])
            for row, path in enumerate(paths):
                right = target(path)
                tokens[request, row] = [(right + other) % VOCABULARY for other in (50, 51, 0, 52)]
        chances = np.broadcast_to(np.array([0.4, 0.3, 0.2, 0.1], np.float32), tokens.shape).copy()
        rows = np.arange(tokens[..., 0].size)
        return Choices(rows, tokens.reshape(-1, KAPPA), chances.reshape(-1, KAPPA))


class Beside(InProcessDraftSide):
    """Works between the early exit and the outcome, and not in the look-up."""

    def post(self, messages):
        super().post(messages)
        if any(isinstance(message, Expected | Verifying) for message in messages):
            self.drafted = [*getattr(self, "drafted", []), *super().collect(0.0)]

    def collect(self, seconds):
        drafted, self.drafted = getattr(self, "drafted", []), []
        return drafted


def blind(texts):
    """A draft model that is right unless the text's last token is a multiple of four, where it knows nothing."""
    out = model(1.0)(texts)
    for row, text in enumerate(texts):
        if text[-1] % 4 == 0:
            out[row] = 1 / VOCABULARY
            out[row, target(text)] = 0.0
    return out


def misses(run, steps=40):
    run.tokens_a_step(steps)  # the rates are learned
    before = lookups("miss")
    run.tokens_a_step(steps)
    return lookups("miss") - before


def test_an_early_exit_foresees_corrections_that_the_draft_model_does_not():
    watched = Watched(Beside(blind, rounds=30, rows=24, outcomes=64, parts=mirror_parts), requests=1)
    alone = Run(Beside(blind, rounds=30, rows=24, outcomes=64), requests=1)
    assert misses(watched) == 0 and misses(alone) > 10


@pytest.mark.parametrize("when", ["early", "under way", "late"])
def test_it_may_be_heard_before_the_launch_is_told_and_after_the_outcome(when):
    """Too late, it is not told. Nothing depends on it but which drafts there are."""
    side = Beside(blind, rounds=30, rows=24, outcomes=64, parts=mirror_parts)
    run = Watched(side, requests=2)
    run.when = when
    run.tokens_a_step(10)
    said = [message for message in side.seen if isinstance(message, Expected)]
    assert bool(said) is (when != "late")
    for message in said:
        rows = len(message.nodes)
        assert message.tokens.shape == message.probabilities.shape == (rows * KAPPA,)
        assert (message.nodes.dtype, message.tokens.dtype, message.probabilities.dtype) == (
            np.int64, np.int32, np.float32,
        )  # fmt: skip


def test_padding_rows_are_not_told():
    side = InProcessDraftSide(model(1.0), parts=mirror_parts)
    run = Watched(side, requests=1)
    run.step()
    (message,) = (message for message in side.seen if isinstance(message, Expected))
    _, packed, _ = run.late
    assert len(message.nodes) == 1 + (packed[0, 1] >= -1).sum() < NODES + 1


def test_the_draft_model_s_own_guesses_come_first_and_the_exit_s_are_added():
    draft, predictor = make_draft([-1, 0], [0, 0]), ExpectedOutcomes()
    before, basis = predictor.predict(draft, 10).guesses, predictor.basis(draft)
    assert before == LikeliestOutcomes().predict(draft, 10).guesses and before
    draft.expected = {ROOT: Candidates(np.array([9000, 100], np.int32), np.array([0.5, 0.3], np.float32))}
    assert predictor.basis(draft) != basis
    after = predictor.predict(draft, 10).guesses
    assert (ROOT, 9000) in [guess[:2] for guess in after] and len(after) == len(before)
    assert draft.trie.child(ROOT, 100) is not None
    assert (ROOT, 100) not in [guess[:2] for guess in after], "what is verified is no guess"


def test_the_exit_ranks_all_outcomes_anew_by_how_often_it_is_right():
    """What the draft model holds for the fifth choice, and the exit for the first."""
    draft, predictor = make_draft([], []), ExpectedOutcomes()
    draft.expected = {ROOT: Candidates(np.array([104, 100], np.int32), np.array([0.6, 0.1], np.float32))}
    for _ in range(300):
        predictor.learn(draft, [], [104])
    first = predictor.predict(draft, 10).guesses[0]
    assert first.token == 104 and first.probability > 0.9


def test_where_only_the_exit_has_spoken_its_choices_are_guessed():
    draft, predictor = make_draft([-1, 0], [0, 0]), ExpectedOutcomes()
    draft.candidates.clear()
    assert predictor.predict(draft, 10).guesses == []
    draft.expected = {2: Candidates(np.array([7, 8], np.int32), np.array([0.5, 0.3], np.float32))}
    guesses, unknown = predictor.predict(draft, 10)
    assert [guess[:2] for guess in guesses] == [(2, 7), (2, 8)] and set(unknown) == {0, 1}


def test_a_commit_takes_back_what_was_expected():
    draft = make_draft([-1, 0], [0, 0])
    draft.expected = {ROOT: draft.candidates[ROOT]}
    commit(draft, [draft.trie.token(1)], draft.trie.epoch)
    assert draft.expected == {}


@pytest.mark.parametrize(("later", "node"), [(1, ROOT), (0, 5)])
def test_what_belongs_to_no_verification_is_dropped(later, node):
    """Of another epoch, or of other nodes. After the outcome too."""
    side = InProcessDraftSide(model(1.0), parts=mirror_parts)
    run = Run(side, requests=1)
    run.step()
    (draft,) = side._side._drafts.values()
    before, choice = STALE._value.get(), np.ones(1)
    session, epoch = draft.session, draft.trie.epoch
    for of, root in ((epoch + later, node), (epoch, draft.trie.root)):
        side.post([Expected(session, of, root, np.array([root]), choice.astype(np.int32), choice)])
    assert STALE._value.get() == before + 2 and draft.verifying is None and draft.expected == {}


def test_fewer_choices_cross_for_larger_batches():
    """Appendix D.1."""
    assert [choices_of(batch) for batch in (1, 8, 16, 32, 64, 128)] == [8, 8, 4, 2, 1, 1]


def test_each_request_hears_of_its_own_rows(monkeypatch):
    """The second request, of which no row was read, hears nothing."""
    side, told, sessions = InProcessDraftSide(model(1.0), parts=mirror_parts), [], []
    run = Run(side, requests=3)
    launched = run.speculation.verification_launched

    def verification_launched(states):
        launched(states)
        sessions.extend(state.session for state in states)
        packed = pack([state.tree for state in states], NODES + 1)
        monkeypatch.setattr(side, "post", told.extend)
        rows, tokens = np.array([1, 3, 17]), np.array([[4, 5], [6, 7], [8, 9]], np.int32)
        run.speculation.expected(states, packed, Choices(rows, tokens, tokens / np.float32(10)))
        monkeypatch.undo()

    run.step()  # the second step verifies drafts
    monkeypatch.setattr(run.speculation, "verification_launched", verification_launched)
    run.step()
    first, last = told
    assert [first.session, last.session] == [sessions[0], sessions[2]]
    assert first.tokens.tolist() == [4, 5, 6, 7] and last.tokens.tolist() == [8, 9]
    assert (len(first.nodes), len(last.nodes)) == (2, 1) and first.root not in first.nodes
