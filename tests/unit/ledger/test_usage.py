"""What an answer says of its steps, against a book that is read step by step."""

from types import SimpleNamespace

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree
from sglang_patches.ledger.outcome import settle
from sglang_patches.ledger.usage import DRAFT_MODEL, REFERENCE, Usage

PROMPT = 3


def step(usage: Usage, start: int, emitted: list[int], tree: DraftTree = EMPTY_TREE) -> None:
    for outcome in settle([SimpleNamespace()], [tree], [start], [np.array(emitted, np.int32)]):
        usage.add(outcome)


def tree(tokens, parents, sources):
    chances = np.full(len(tokens), 0.5, np.float32)
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), chances, np.array(sources, np.uint8)
    )


@pytest.fixture
def usage():
    usage = Usage(PROMPT, by_token=True)
    step(usage, 3, [10])  # the prompt's forward
    step(usage, 4, [11, 12, 13], tree([11, 12, 99], [-1, 0, 0], [1, DRAFT_MODEL, 3]))
    step(usage, 7, [14])
    return usage


def test_nodes_that_were_verified_and_accepted_by_source(usage):
    told = usage.summary(5)
    assert told["steps"] == 2
    assert told["drafted"] == {"prior": 1, "session": 1, "draft_model": 1}
    assert told["accepted"] == {"prior": 1, "draft_model": 1}


def test_each_token_s_source(usage):
    assert usage.summary(5)["sources"] == ["target", "prior", "draft_model", "target", "target"]
    assert usage.summary(2)["sources"] == ["target", "prior"]  # a stop within an accepted path


def test_accepted_tokens_behind_the_end_do_not_count():
    """With overlap scheduling the step that the answer ends in is not the last one."""
    for beyond in (False, True):
        usage = Usage(PROMPT)
        step(usage, 3, [10])
        step(usage, 4, [11, 12, 13], tree([11, 12], [-1, 0], [1, DRAFT_MODEL]))
        if beyond:
            step(usage, 7, [14, 15], tree([14], [-1], [2]))
        told = usage.summary(2)
        assert told == {"steps": 1, "drafted": {"prior": 1, "draft_model": 1}, "accepted": {"prior": 1}}


def test_a_step_beyond_the_end_does_not_count(usage):
    step(usage, 8, [15, 16], tree([15], [-1], [2]))
    assert usage.summary(5) == usage.summary(5) and usage.summary(5)["steps"] == 2
    assert usage.summary(6)["steps"] == 3 and usage.summary(6)["drafted"]["live"] == 1


def test_sources_are_kept_for_who_asks():
    usage = Usage(PROMPT, by_token=False)
    step(usage, 4, [11], tree([11], [-1], [2]))
    assert usage.summary(2) == {"steps": 1, "drafted": {"live": 1}, "accepted": {"live": 1}}


def test_tokens_that_were_taken_back_have_the_source_of_those_drawn_again(usage):
    step(usage, 5, [20, 21], tree([20], [-1], [2]))
    assert usage.summary(9)["sources"] == ["target", "prior", "live", "target"]


def test_a_decode_instance_gets_the_first_token_from_elsewhere():
    usage = Usage(PROMPT, by_token=True)
    step(usage, 4, [11, 12], tree([11], [-1], [1]))
    assert usage.summary(3)["sources"] == ["target", "prior", "target"]
    assert usage.summary(3)["steps"] == 1


def test_a_prediction_s_tokens_whoever_proposed_them():
    """Drafted tokens that the reference proposed too: accepted, refused, and not verified. Beside them others."""
    usage = Usage(PROMPT, predicted=True)
    verified = tree([11, 99, 12, 13], [-1, -1, 0, 2], [1, 3, REFERENCE, REFERENCE])
    (outcome,) = settle([SimpleNamespace()], [verified], [3], [np.array([11, 12, 14], np.int32)])
    outcome.predicted = tree([11, 12, 13, 20], [-1, 0, 1, 2], [REFERENCE] * 4)
    usage.add(outcome)
    assert usage.summary(9)["prediction"] == {"accepted": 2, "rejected": 1}


def test_accepted_tokens_of_a_prediction_behind_the_end_do_not_count():
    usage = Usage(PROMPT, predicted=True)
    (outcome,) = settle(
        [SimpleNamespace()], [tree([11, 12], [-1, 0], [1, 1])], [3], [np.array([11, 12, 14], np.int32)]
    )
    outcome.predicted = outcome.tree
    usage.add(outcome)
    assert usage.summary(1)["prediction"] == {"accepted": 1, "rejected": 0}


def test_only_a_request_with_a_prediction_is_told_of_it():
    assert "prediction" not in Usage(PROMPT).summary(0)
    assert Usage(PROMPT, predicted=True).summary(0)["prediction"] == {"accepted": 0, "rejected": 0}


def test_an_answer_that_ends_at_its_prefill_has_a_source():
    """It is told before the outcome of the prefill."""
    assert Usage(prompt=3, by_token=True).summary(1)["sources"] == ["target"]
