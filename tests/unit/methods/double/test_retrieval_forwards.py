"""A draft forward that checks a phrase keeps as many of its tokens as the draft model agrees with, and one more (Eq. 5)."""

import math

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from sglang_patches.draft_side.seams import Retriever
from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.drafting.cache import SpeculationCache
from sglang_patches.exchange.messages import Closed, Committed, Opened, Verifying
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.double import AllAccepted, RetrievalChains
from tests.support.agreeing_model import VOCABULARY, model, target
from tests.support.draft_side import FunctionModel, InProcessDraftSide, text_of
from tests.unit.drafting.test_speculation import Run

ROWS, DEPTH, LONGEST = 24, 10, 15
TEXT = [1, 2, 3]


def continuation(text, length):
    said = list(text)
    for _ in range(length):
        said.append(target(said))
    return said[len(text) :]


def chain_of(tokens):
    size = len(tokens)
    parents = np.arange(-1, size - 1, dtype=np.int32)
    return DraftTree(
        np.array(tokens, np.int32), parents, np.full(size, 0.5, np.float32), np.ones(size, np.uint8)
    )


class Knowing(Retriever):
    """Proposes the target's own text, whose `right` first tokens are right."""

    def __init__(self, right, depth=DEPTH):
        self.right, self.depth, self.asked, self.ended = right, depth, 0, []

    def phrases(self, rows, nodes):
        self.asked += 1
        return [chain_of(self._phrase(text_of(*row), min(nodes, self.depth))) for row in rows]

    def _phrase(self, text, size):
        tokens = continuation(text, size)
        return tokens[: self.right] + [(token + 50) % VOCABULARY for token in tokens[self.right :]]

    def closed(self, draft):
        self.ended.append(draft.session)


class Noting(FunctionModel):
    """A draft model with KV: knows which nodes hold a slot."""

    def __init__(self, function):
        super().__init__(function)
        self.slots = set()

    def forward(self, rows):
        self.slots |= {node for _, node in rows}
        return super().forward(rows)

    def discard(self, draft, nodes):
        assert self.slots.issuperset(nodes)
        self.slots -= set(nodes)


def make_side(right, depth=DEPTH, rows=ROWS, ratio=None, serial=False):
    retriever, drafter = Knowing(right, depth), RetrievalChains(LONGEST, ratio or SpeedRatio())
    parts = DraftParts(lambda: Learner(AllAccepted(), drafter), retriever, ratio)
    side = DraftSide(Noting(model(1.0)), parts, rows, rows, serial)
    side.hear([Opened("s", np.array(TEXT, np.int32), 1)])
    return side, retriever


def drafted(answers):
    return [token for answer in answers for token in answer.tokens.tolist()]


@pytest.mark.parametrize("right", [0, 1, 4, DEPTH])
def test_a_forward_keeps_what_matches_and_one_token_more(right):
    side, _ = make_side(right)
    assert drafted(side.work()) == continuation(TEXT, right + 1)


def test_forwards_follow_each_other_along_one_chain():
    side, retriever = make_side(right=3)
    said = [token for _ in range(3) for token in drafted(side.work())]
    assert said == continuation(TEXT, 12) and retriever.asked == 3


def test_the_worker_gets_the_same_chain():
    side, cache = make_side(right=2)[0], SpeculationCache()
    cache.open("s", len(TEXT)).begin_epoch(1)
    while (answers := side.work()) is not None:
        assert all(cache.grow(growth) for growth in answers)
    tree = cache.subtree("s", 100, 100, 16)
    assert tree.tokens.tolist() == continuation(TEXT, len(tree)) and len(tree) >= LONGEST
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    assert (np.diff(tree.probs) <= 0).all() and tree.probs[0] == pytest.approx(0.6, abs=0.01)


def test_nothing_of_a_refused_phrase_stays():
    side, _ = make_side(right=2)
    side.work()
    (draft,) = side._drafts.values()
    nodes = set(draft.trie.path(draft.trie.follow(continuation(TEXT, 3))[-1]))
    assert len(draft.trie) == 3 and set(draft.candidates) <= nodes | {draft.trie.root}
    assert side._model.slots <= nodes | {draft.trie.root}


def test_a_full_forward_checks_no_phrase():
    side, retriever = make_side(right=4, rows=1)
    assert drafted(side.work()) == continuation(TEXT, 1) and not retriever.asked


def test_the_last_verified_node_is_run_with_a_phrase_behind_it():
    side, _ = make_side(right=4, depth=4)
    first = drafted(side.work())
    (draft,) = side._drafts.values()
    nodes = np.array(draft.trie.follow(first), np.int64)
    parents = np.array([0, *nodes[:-1]], np.int64)
    side.hear([Verifying("s", 1, nodes, parents, np.array(first, np.int32))])
    assert drafted(side.work()) == continuation(TEXT, 10)[5:]


def test_on_the_targets_device_nothing_is_run_while_it_verifies():
    side, _ = make_side(right=2, serial=True)
    none = np.empty(0, np.int64)
    side.hear([Verifying("s", 1, none, none, np.empty(0, np.int32))])
    assert side.work() is None
    side.hear([Committed("s", 3, np.array(continuation(TEXT, 1), np.int32), 2)])
    assert drafted(side.work()) == continuation(TEXT, 4)[1:]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("ratio", "gamma"), [(1.0, 1), (1.6, 2), (2.8, 3), (5.0, 5)])
def test_a_round_has_as_many_forwards_as_fit_beside_a_verification(ratio, gamma):
    clock = Clock()
    speed = SpeedRatio(clock)
    assert speed.value == math.inf
    side, _ = make_side(right=0, ratio=speed)
    speed.verification_took(ratio)
    speed.forward_took(1.0)
    speed.forward_took = lambda seconds: None
    assert sum(bool(side.work()) for _ in range(10)) == gamma
    side.hear([Committed("s", 3, np.array(continuation(TEXT, 1), np.int32), 1)])
    assert sum(bool(side.work()) for _ in range(10)) == gamma


def test_the_ratio_is_that_of_verifications_and_forwards():
    clock = Clock()
    side, _ = make_side(right=0, ratio=(speed := SpeedRatio(clock)))
    function = side._model.function

    def slow(texts):
        clock.now += 2.0
        return function(texts)

    side._model.function = slow
    side.work()
    none = np.empty(0, np.int64)
    side.hear([Verifying("s", 1, none, none, np.empty(0, np.int32))])
    clock.now += 7.0
    side.hear([Committed("s", 3, np.array(continuation(TEXT, 1), np.int32), 1)])
    assert speed.value == pytest.approx(3.5)


def test_the_retriever_hears_of_the_end():
    side, retriever = make_side(right=1)
    side.hear([Opened("s", np.array(TEXT, np.int32), 2)])
    assert retriever.ended == []
    side.hear([Closed("s")])
    assert retriever.ended == ["s"]


def gain(right, agreement):
    """Tokens a step. The draft side has a forward's time whenever its answers are collected."""

    def parts() -> DraftParts:
        chains = RetrievalChains(LONGEST, SpeedRatio())
        return DraftParts(lambda: Learner(AllAccepted(), chains), Knowing(right))

    return Run(InProcessDraftSide(model(agreement), rounds=1, rows=ROWS, parts=parts)).tokens_a_step(40)


def test_retrieval_gives_more_tokens_a_step_in_the_same_forwards():
    assert 1.5 * gain(0, 1.0) < gain(4, 1.0)


def test_a_draft_model_that_is_wrong_refuses_right_phrases():
    assert gain(4, 0.3) < gain(4, 0.7) < gain(4, 1.0)


def test_a_retriever_that_knows_nothing():
    class Empty(Retriever):
        def phrases(self, rows, nodes):
            return [EMPTY_TREE] * len(rows)

    side = DraftSide(
        Noting(model(1.0)),
        DraftParts(lambda: Learner(AllAccepted(), RetrievalChains(LONGEST, SpeedRatio())), Empty()),
        ROWS,
        ROWS,
    )
    side.hear([Opened("s", np.array(TEXT, np.int32), 1)])
    assert drafted(side.work()) == continuation(TEXT, 1)
