"""How many sequences DUO drafts, how long they are, and in how many forwards."""

import numpy as np
import pytest

from sglang_patches.draft_side.side import DraftParts, DraftSide, Learner
from sglang_patches.exchange.messages import Opened, Sampling, Verifying
from sglang_patches.ledger.rates import SpeedRatio
from sglang_patches.methods.duo import Heads, Sequences
from tests.support.draft_side import FunctionModel

ROWS, LONGEST, VOCABULARY = 24, 16, 40
TEXT = [1, 2, 3]
NONE = np.empty(0, np.int64)


def unsure(first, *others):
    """A model that gives token t + 1 after t with probability `first`, and the tokens after that with `others`."""

    def distributions(texts):
        out = np.zeros((len(texts), VOCABULARY), np.float32)
        for row, text in enumerate(texts):
            for rank, chance in enumerate((first, *others)):
                out[row, (text[-1] + 1 + rank) % VOCABULARY] = chance
        return out

    return distributions


def make_side(function, ratio=8.0, sampling=None, **how):
    speed = SpeedRatio()
    speed.verification_took(ratio)
    speed.forward_took(1.0)
    speed.verification_took = speed.forward_took = lambda seconds: None
    model = FunctionModel(function)
    side = DraftSide(
        model, DraftParts(lambda: Learner(Heads(**how), Sequences(LONGEST, speed)), ratio=speed), ROWS, ROWS
    )
    opened = Opened("s", np.array(TEXT, np.int32), 1, *([sampling] if sampling else []))
    side.hear([opened, Verifying("s", 1, NONE, NONE, np.empty(0, np.int32))])
    return side, model


def sequences(side):
    """Draws them to their ends; the tokens of each, and the rows of each forward."""
    rows, before = [], side._model.runs
    while side.work() is not None:
        rows.append(side._model.runs - before)
        before = side._model.runs
    (draft,) = side._drafts.values()
    found = []
    for node, token, _ in draft.trie.children(draft.trie.root):
        said = [token]
        while children := list(draft.trie.children(node)):
            ((node, token, _),) = children
            said.append(token)
        found.append(said)
    return found, [count for count in rows if count]


def test_a_draft_model_that_is_sure_drafts_one_sequence():
    found, rows = sequences(make_side(unsure(0.9, 0.05))[0])
    assert found == [list(range(4, 12))] and rows == [1] * 8


def test_tokens_above_theta_begin_a_sequence_each():
    """theta = .4 * .4 = .16: three tokens are likelier."""
    found, _ = sequences(make_side(unsure(0.4, 0.25, 0.2, 0.1))[0])
    assert [said[0] for said in found] == [4, 5, 6]


def test_the_sequences_share_gamma():
    """gamma = 8: two sequences of four tokens."""
    found, _ = sequences(make_side(unsure(0.5, 0.3, 0.2))[0])
    assert [len(said) for said in found] == [4, 4]


def test_all_sequences_are_rows_of_one_forward():
    _, rows = sequences(make_side(unsure(0.3, 0.25, 0.2, 0.15), ratio=16.0)[0])
    # The root and the first head decide how many there are. From then on the others are one token behind the first.
    assert rows == [1, 1, 4, 4, 3]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_fixed_number_of_sequences(count):
    found, _ = sequences(make_side(unsure(0.9, 0.05, 0.03, 0.02), fixed=count)[0])
    assert len(found) == count and {len(said) for said in found} == {-(-8 // count)}


def test_no_more_than_eight():
    found, _ = sequences(make_side(unsure(*[1 / 12] * 12))[0])
    assert len(found) == 8


def test_no_sequence_begins_with_a_token_that_ends_the_request():
    sampling = Sampling(1.0, 1, 1.0, 0.0, None, frozenset([5]))
    found, _ = sequences(make_side(unsure(0.4, 0.3, 0.2), sampling=sampling)[0])
    assert [said[0] for said in found] == [4, 6]


def test_two_tokens_are_drafted_however_slow_the_draft_model_is():
    found, _ = sequences(make_side(unsure(0.9, 0.05), ratio=0.5)[0])
    assert [len(said) for said in found] == [2]
