"""What is guessed and what is accepted is counted by accepted length and by who proposed it."""

import numpy as np
from prometheus_client import Counter

from sglang_patches.draft_side.side import GUESSES, DraftParts, DraftSide, Learner
from sglang_patches.exchange.messages import Opened, Verifying
from sglang_patches.ledger import verified
from sglang_patches.ledger.outcome import settle
from sglang_patches.ledger.requests import RequestState
from sglang_patches.ledger.usage import DRAFT_MODEL
from sglang_patches.methods.saguaro import GeometricFanOut, Rollouts
from tests.support.agreeing_model import model, target
from tests.support.draft_side import FunctionModel
from tests.unit.drafting.texts import make_tree

OUTCOMES = 8
TEXT = [1, 2, 3]


def values(counter: Counter) -> dict[str, float]:
    (family,) = counter.collect()
    return {
        next(iter(sample.labels.values())): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def since(counter: Counter, before: dict[str, float]) -> dict[str, float]:
    return {
        label: value - before.get(label, 0.0)
        for label, value in values(counter).items()
        if value > before.get(label, 0.0)
    }


def test_verified_tokens_are_counted_by_who_proposed_them():
    tree = make_tree([5, 6, 7, 8], [-1, 0, 0, -1])
    tree.sources[:] = [DRAFT_MODEL, DRAFT_MODEL, 1, 3]
    requests = [RequestState] * 2  # any two
    emitted = [np.array(tokens, np.int32) for tokens in ([5, 7, 9], [4])]
    outcomes = settle(requests, [tree, tree], [3, 3], emitted)
    before, total = (values(verified.VERIFIED), values(verified.ACCEPTED)), verified.total()
    verified.count(outcomes)
    assert verified.total() == total + 8
    assert since(verified.VERIFIED, before[0]) == {"draft_model": 4, "prior": 2, "session": 2}
    assert since(verified.ACCEPTED, before[1]) == {"draft_model": 1, "prior": 1}


def test_guesses_are_counted_by_the_tokens_accepted_before_them():
    side = DraftSide(
        FunctionModel(model(1.0)),
        DraftParts(lambda: Learner(GeometricFanOut(), Rollouts(4))),
        OUTCOMES,
        OUTCOMES,
    )
    side.hear([Opened("s", np.array(TEXT, np.int32), 1)])
    while side.work() is not None:
        pass
    before = values(GUESSES)
    first = target(TEXT)
    nodes, tokens = np.array([-1, -2]), np.array([first, target([*TEXT, first])], np.int32)
    side.hear([Verifying("s", 1, nodes, np.array([0, -1]), tokens)])
    while side.work() is not None:
        pass
    found = since(GUESSES, before)
    assert set(found) == {"0", "1", "2"}
    assert sum(found.values()) == OUTCOMES
