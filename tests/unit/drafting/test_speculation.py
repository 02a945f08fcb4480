"""The worker's end of a draft side, with a real draft side in this process: hits, misses, restarts, retractions."""

import time

import numpy as np
import pytest

from sglang_patches.drafting.seams import NO_PATIENCE, Patience
from sglang_patches.drafting.speculation import LOOKUPS, Speculation
from sglang_patches.exchange.messages import GREEDY, Closed, Committed, Growth, Opened, Sampling, Verifying
from sglang_patches.ledger.requests import Step
from tests.support.agreeing_model import VOCABULARY, model, target
from tests.support.draft_side import FunctionModel, InProcessDraftSide
from tests.unit.drafting.texts import make_book, make_req

NODES = 7


def test_the_draft_side_is_told_whose_request_it_is(monkeypatch):
    """It keeps what it learns, and its own datastore, by tenant."""
    side, told = InProcessDraftSide(model(1.0)), []
    monkeypatch.setattr(side, "post", told.extend)
    Speculation(side, NODES, lambda state: GREEDY).open(make_book(tenant="acme").open([make_req()]))
    assert [(type(message), message.tenant) for message in told] == [(Opened, "acme")]


def test_the_draft_side_follows_only_requests_that_take_its_drafts(monkeypatch):
    side, told = InProcessDraftSide(model(1.0)), []
    monkeypatch.setattr(side, "post", told.extend)
    reqs = [
        make_req(name, custom_params={"specstore": {"draft": [name]}})
        for name in ("draft_model", "datastore")
    ]
    states = make_book().open(reqs)
    speculation = Speculation(side, NODES, lambda state: GREEDY)
    speculation.open(states)
    speculation.look_up(states, [NODES] * 2, lambda states, missed: NO_PATIENCE)
    assert [message.session for message in told] == ["draft_model"]


class Run:
    """Requests decoded as the worker does it: look up, verify, commit, tell."""

    def __init__(self, side, requests=2):
        self.side, self.book = side, make_book()
        self.speculation = Speculation(side, NODES, lambda state: GREEDY)
        self.reqs = [make_req(f"r{i}", (1, 2, 3 + i)) for i in range(requests)]
        self.texts = [list(req.origin_input_ids) for req in self.reqs]
        self.speculation.open(self.book.open(self.reqs))
        for req, text in zip(self.reqs, self.texts, strict=True):  # the prefill's token
            text.append(target(text))
            req.output_ids.append(text[-1])
        self.steps = self.emitted = 0
        self.patience = lambda states, missed: NO_PATIENCE

    def step(self):
        states, taken_back = self.book.read(self.begin())
        self.speculation.taken_back(taken_back)
        self.speculation.heard(self.book.settle(states))
        trees = self.speculation.look_up(states, [NODES] * len(states), self.patience)
        for state, tree in zip(states, trees, strict=True):
            tree.check_integrity(nodes=NODES)
            state.tree = tree
        self.speculation.verification_launched(states)
        emitted = [self.verified(text, tree) for text, tree in zip(self.texts, trees, strict=True)]
        self.speculation.heard(self.book.settle(self.book.read_ahead(self.begin(emitted))))
        return emitted

    def begin(self, emitted=None):
        emitted = emitted or [[] for _ in self.reqs]
        lengths = [len(text) + len(new) for text, new in zip(self.texts, emitted, strict=True)]
        return Step(self.reqs, lengths, emitted)

    def verified(self, text, tree):
        emitted, parent = [], -1
        while True:
            emitted.append(target(text + emitted))
            found = [
                n for n in range(len(tree)) if tree.parents[n] == parent and tree.tokens[n] == emitted[-1]
            ]
            if not found:
                return emitted
            parent = found[0]

    def commit(self, emitted):
        for req, text, new in zip(self.reqs, self.texts, emitted, strict=True):
            text += new
            req.output_ids.extend(new)
            self.steps += 1
            self.emitted += len(new)

    def tokens_a_step(self, steps):
        self.steps = self.emitted = 0
        for _ in range(steps):
            self.commit(self.step())
        return self.emitted / self.steps


class Beside(InProcessDraftSide):
    """Works between the launch and the outcome, and not in the look-up."""

    def post(self, messages):
        super().post(messages)
        if any(isinstance(message, Verifying) for message in messages):
            self.drafted = super().collect(0.0)

    def collect(self, seconds):
        drafted, self.drafted = getattr(self, "drafted", []), []
        return drafted


class Late(InProcessDraftSide):
    """Says at once that it has read a text, and drafts only while it is waited for."""

    asked = 0

    def post(self, messages):
        super().post(messages)
        opened = [message.session for message in messages if isinstance(message, Opened)]
        self.read = [*getattr(self, "read", []), *map(nothing_new, opened)]

    def collect(self, seconds):
        read, self.read = getattr(self, "read", []), []
        self.asked += seconds > 0
        return read + (super().collect(seconds) if seconds else [])


def nothing_new(session):
    none = np.empty(0, np.int64)
    return Growth(session, -1, 0, none, none, none.astype(np.int32), none.astype(np.float32))


def lookups(result):
    return LOOKUPS.labels(result)._value.get()


def test_a_draft_that_is_always_right_is_always_hit():
    run = Run(InProcessDraftSide(model(1.0)))
    run.tokens_a_step(1)
    misses = lookups("miss")
    assert run.tokens_a_step(20) > 3 and lookups("miss") == misses


def test_a_better_draft_gives_more_tokens_a_step():
    gains = [Run(InProcessDraftSide(model(chance))).tokens_a_step(40) for chance in (0.0, 0.5, 0.8, 1.0)]
    assert gains == sorted(gains) and gains[0] < 1.6 and gains[-1] > 2 * gains[0]


def test_predicted_ends_are_hits():
    """A draft that is never right, but whose second guess is: the predictor's outcome is found after the refusal."""

    def second(texts):
        out = np.full((len(texts), VOCABULARY), 0.001, np.float32)
        for row, text in enumerate(texts):
            out[row, (target(text) + 1) % VOCABULARY], out[row, target(text)] = 0.6, 0.3
        return out

    run = Run(InProcessDraftSide(second))
    hits = lookups("hit")
    run.tokens_a_step(20)
    assert lookups("hit") - hits > 30


def test_what_the_draft_side_is_told_is_what_happened():
    side = InProcessDraftSide(model(0.7))
    run = Run(side)
    for _ in range(10):
        run.commit(run.step())
    told = {}
    for message in side.seen:
        if isinstance(message, Opened):
            told[message.session] = message.tokens.tolist()
        elif isinstance(message, Committed):
            assert message.start == len(told[message.session])
            told[message.session] += message.tokens.tolist()
    assert list(told.values()) == run.texts
    assert any(isinstance(message, Verifying) and len(message.nodes) for message in side.seen)
    run.speculation.close([run.book.close("r0")])
    assert isinstance(side.seen[-1], Closed) and side.seen[-1].session == "r0"


def test_the_draft_side_is_told_how_the_target_draws():
    side, sampled = InProcessDraftSide(model(1.0)), Sampling(0.7, 20, 0.9, 0.1, noise=7)
    samplings = {"greedy": GREEDY, "sampled": sampled}
    speculation = Speculation(side, NODES, lambda state: samplings[state.req.rid])
    states = make_book().open([make_req("greedy"), make_req("sampled")])
    speculation.open(states)
    speculation.taken_back(states)
    told = [(message.session, message.sampling) for message in side.seen]
    assert told == 2 * [("greedy", GREEDY), ("sampled", sampled)]


def test_a_draft_side_that_was_restarted_gets_the_sessions_again():
    side = InProcessDraftSide(model(1.0))
    run = Run(side)
    before = run.tokens_a_step(5)
    side.forget()
    run.tokens_a_step(3)
    assert before > 3 and run.tokens_a_step(5) > 3


def test_a_retracted_step_is_forgotten():
    run = Run(InProcessDraftSide(model(1.0)), requests=1)
    run.commit(run.step())
    run.step()  # dropped; another sample draws one other token
    run.texts[0].append(5)
    run.reqs[0].output_ids.append(5)
    assert run.tokens_a_step(10) > 2.5


@pytest.mark.parametrize("fault", ["stale epoch", "unknown parent", "silent"])
def test_a_lying_draft_side_changes_nothing(fault):
    class Lying(InProcessDraftSide):
        def collect(self, seconds):
            answers = [] if fault == "silent" else super().collect(seconds)
            for answer in answers:
                if fault == "stale epoch":
                    answer.epoch -= 1
                else:
                    answer.parents = answer.parents + 1000
            return answers

    assert Run(Lying(model(1.0))).tokens_a_step(10) == 1


@pytest.mark.parametrize(("seconds", "waits"), [(0.0, False), (30.0, True)])
def test_a_missing_tree_is_waited_for_as_long_as_the_fallback_says(seconds, waits):
    run, asked = Run(Late(model(1.0))), []
    run.patience = lambda states, missed: asked.append((len(states), len(missed))) or Patience(seconds)
    assert (run.tokens_a_step(5) > 1) is waits
    assert asked[0] == (2, 2)


def test_the_draft_model_s_reading_of_a_prompt_is_not_waited_for():
    class Reading(Late):
        def post(self, messages):
            super().post(messages)
            self.read = []

    run, asked = Run(Reading(model(1.0))), []
    run.patience = lambda states, missed: asked.append(list(missed)) or Patience(30.0)
    assert run.tokens_a_step(2) == 1
    assert asked == [[], []] and run.side.asked == 0


def test_a_text_that_has_become_too_long_for_the_draft_model_is_not_waited_for():
    class ShortModel(FunctionModel):
        def takes(self, draft):
            return draft.text.length <= 20

        def ready(self, draft):
            return self.takes(draft)

    class Short(InProcessDraftSide):
        def new_model(self):
            return ShortModel(self._function)

    run, asked = Run(Short(model(0.5)), requests=1), []
    run.patience = lambda states, missed: asked.append(list(missed)) or Patience(30.0)
    run.tokens_a_step(25)
    assert len(run.texts[0]) > 30
    assert asked[-5:] == [[]] * 5


def test_a_launch_knows_how_long_it_was_waited_for():
    class Slow(Late):
        def collect(self, seconds):
            time.sleep(0.2 if seconds else 0.0)
            return super().collect(seconds)

    run = Run(Slow(model(1.0)), requests=1)
    run.patience = lambda states, missed: Patience(30.0)
    run.tokens_a_step(1)
    assert run.speculation.seconds_waited() >= 0.2
    assert run.speculation.seconds_waited() == 0, "of a step without a look-up"


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_missing_tree_is_waited_for_until_it_is_large_enough(nodes):
    run = Run(Late(model(1.0), rounds=1), requests=1)
    run.patience = lambda states, missed: Patience(30.0, nodes)
    waited, hits = lookups("waited"), lookups("hit")
    assert run.tokens_a_step(1) == nodes + 1
    assert lookups("waited") == waited + 1 and lookups("hit") == hits


def test_a_missing_tree_that_is_full_is_waited_for_no_longer():
    """The patience may ask for more nodes than a tree has room for."""

    asked = []
    for nodes in (2, 4):
        side = Late(model(1.0), rounds=1)
        run = Run(side, requests=1)
        run.speculation._nodes = 2
        run.patience = lambda states, missed, nodes=nodes: Patience(30.0, nodes)
        assert run.tokens_a_step(1) == 3
        asked.append(side.asked)
    assert asked[0] == asked[1]


def test_what_was_drafted_beside_the_target_is_a_hit():
    run = Run(Beside(model(1.0), rounds=30), requests=1)
    run.tokens_a_step(2)
    misses = lookups("miss")
    assert run.tokens_a_step(10) > 4 and lookups("miss") == misses


def test_a_draft_side_that_is_down_is_not_waited_for():
    class Down(InProcessDraftSide):
        def collect(self, seconds):
            return []

    run = Run(Down(model(1.0)))
    run.patience = lambda states, missed: Patience(3600.0)
    assert run.tokens_a_step(3) == 1


def test_a_request_that_is_over_is_neither_drafted_nor_waited_for():
    side = InProcessDraftSide(model(1.0))
    run = Run(side, requests=1)
    run.patience = lambda states, missed: Patience(3600.0) if missed else NO_PATIENCE
    run.commit(run.step())
    (state,), _ = run.book.read(run.begin())
    text = list(run.texts[0])
    for _ in range(2):
        text.append(target(text))
    state.ends = frozenset(text[-1:])  # the second token of the next step
    run.commit(run.step())
    assert isinstance(side.seen[-1], Closed)
    count, results = len(side.seen), [lookups(result) for result in ("hit", "waited", "miss")]
    assert len(run.step()[0]) == 1  # SGLang's step too many
    assert len(side.seen) == count
    assert results == [lookups(result) for result in ("hit", "waited", "miss")]
    run.speculation.close([run.book.close("r0")])
    assert len(side.seen) == count


def test_a_request_that_was_over_in_a_step_that_did_not_happen_is_drafted_for_again():
    run = Run(InProcessDraftSide(model(1.0)), requests=1)
    run.commit(run.step())
    (state,), _ = run.book.read(run.begin())
    state.ends = frozenset([target(run.texts[0])])
    run.step()  # dropped; another token is drawn
    run.texts[0].append(5)
    run.reqs[0].output_ids.append(5)
    state.ends = frozenset()
    assert run.tokens_a_step(5) > 2.5


def test_no_row_of_the_draft_model_follows_a_token_that_ends_the_request():
    """Also below a tree of another drafter's, and through many verifications."""
    ran = []

    def noted(texts):
        ran.extend(texts)
        return model(0.7)(texts)

    ends = frozenset(range(0, VOCABULARY, 5))
    sampling = Sampling(1.0, 1, 1.0, 0.0, None, ends)
    side = InProcessDraftSide(noted)
    run = Run(side)
    run.speculation._sampling_of = lambda state: sampling
    run.speculation.taken_back(run.book.read(run.begin())[0])  # opened again
    ran.clear()
    run.tokens_a_step(30)
    over = [text for text in ran if not ends.isdisjoint(text[4:]) and text[-1] in ends]
    committed = {tuple(text[:length]) for text in run.texts for length in range(len(text) + 1)}
    assert all(tuple(text) in committed for text in over)
    assert len(ran) > 100
