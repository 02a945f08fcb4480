"""`python -m benchmarks.rollouts`: what its replay takes from text of older epochs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rollouts import DROPPED, KEPT, PLAIN, Epochs, replayed, summary
from benchmarks.traces import Trace

LENGTH, SIBLINGS, NODES = 48, 3, 7


@pytest.fixture(scope="module")
def epochs() -> Epochs:
    """Two epochs with the same answers, in which no token occurs twice."""
    tokens = np.random.default_rng(0).permutation(1000).astype(np.int32)
    parts = np.split(tokens[: SIBLINGS * LENGTH], SIBLINGS)
    answers = [Trace(str(place), part[:8], part[8:]) for place, part in enumerate(parts)]
    return [answers, answers]


@pytest.mark.parametrize(
    ("text", "second"), [(PLAIN, "as the first"), (KEPT, "fewer"), (DROPPED, "as the first")]
)
def test_steps_of_two_equal_epochs(epochs, text, second):
    first, again = replayed(epochs, text, group=False, nodes=NODES, vocab_size=1000)
    assert first["tokens"] == again["tokens"] == first["steps"], "nothing recurs within an epoch"
    expected = "fewer" if again["steps"] < first["steps"] / 2 else "as the first"
    assert expected == second
    assert (again["steps"] == first["steps"]) == (second == "as the first")


def test_siblings_of_a_group_draft_for_each_other():
    shared = np.random.default_rng(0).permutation(1000).astype(np.int32)
    late = Trace(
        "0", shared[:8], np.concatenate([shared[500:520], shared[8:28]])
    )  # says the other's tokens 20 later
    epoch = [[Trace("0", shared[:8], shared[8:48]), late]]
    (alone,), (together,) = (replayed(epoch, KEPT, group, NODES, 1000) for group in (False, True))
    assert together["steps"] < alone["steps"]


def test_an_update_that_turns_tokens_makes_older_text_wrong(epochs):
    speed = {
        (row["weights"], row["epoch"]): row["over_plain"]
        for row in summary(epochs, NODES)
        if row["text"] == KEPT and not row["group"]
    }
    assert speed["as trained", 1] > 1.5 * speed["turned", 1]
