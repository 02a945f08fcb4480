"""What is drafted after which outcomes: early exits, when they speak and what they save, and the planner against fixed shapes."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.pipeline.drafts import (
    PLANNER,
    against_shapes,
    bounds,
    by_choices,
    by_window,
    middle,
    played,
    shapes,
)
from benchmarks.pipeline.experiments import Question
from benchmarks.pipeline.pairs import VOCABULARY, synthetic_pairs
from benchmarks.pipeline.simulation import EarlyExit, Times

LAYERS = 20
TIMES = Times(lambda rows: 1.0, lambda rows: 0.05)


def with_exits(pairs, right, seed=0):
    """right: how often the first of eight choices is the target's token, by layer; else the third is, in half of the cases, and the
    sixth in a quarter."""
    rng = np.random.default_rng(seed)
    for pair in pairs:
        for layer, rate in right.items():
            choices = (pair.tokens[:, None] + 1 + np.arange(8, dtype=np.int32)) % VOCABULARY
            first = rng.random(len(pair)) < rate
            other = rng.random(len(pair))
            third, sixth = ~first & (other < 0.5), ~first & (other > 0.75)
            for rank, of in ((0, first), (2, third), (5, sixth)):
                choices[of, rank] = pair.tokens[of]
            chances = np.broadcast_to(np.array([0.5, *7 * [0.07]], np.float32), choices.shape)
            pair.exits[layer] = choices, chances
    return pairs


def made(right, count=5, length=80):
    return with_exits(synthetic_pairs(count, length, 0.6, 0.6, 0.5, seed=1), right)


def question(pairs, times=TIMES, lookahead=7):
    return Question(times, lookahead, 24, 2.0, lambda case, batch: pairs)


def rate(tally):
    return tally.hit_rate


def test_an_exit_that_knows_everything_leaves_no_miss():
    pairs = made({10: 1.0})
    assert rate(played(question(pairs), {}, 1, middle(pairs, LAYERS))) == 1


@pytest.mark.parametrize(("share", "some"), [(0.1, True), (0.97, False)])
def test_what_comes_too_late_is_not_drafted_for(share, some):
    """A guess is known to the worker when the draft side's round has ended."""
    pairs = made({10: 1.0})
    tally = played(question(pairs), {}, 1, EarlyExit(10, share, 8))
    assert (tally.tokens_a_step() > 2.2) is some


def test_more_choices_miss_less_and_a_deeper_exit_knows_more():
    pairs = made({5: 0.3, 15: 0.7})
    rows = list(by_choices(question(pairs), [{}], 1, [40.0], LAYERS))
    found = {(row["exit"], row["choices"]): row["hit_rate"].value for row in rows}
    for exit in ("5/20", "15/20"):
        rates = [found[exit, choices] for choices in (1, 2, 4, 8)]
        assert rates == sorted(rates) and rates[0] < rates[-1]
    assert found["15/20", 1] > found["5/20", 1]
    own = next(row for row in rows if row["exit"] == "draft")
    assert own["hits_over_draft"].value == 1 and own["choices"] == 0


def test_drafting_beside_the_forward_is_on_no_critical_path():
    pairs = made({10: 0.9})
    asked = question(pairs, replace(TIMES, target=lambda rows: 1.0))
    rows = {(row["predicts"], row["window"]): row for row in by_window(asked, {}, 1, [20.0], LAYERS, (2, 5))}
    for window in (2, 5):
        exit, serial = rows["exit", window], rows["serial", window]
        assert exit["critical"] < 0.2 * serial["critical"] and serial["critical"] == pytest.approx(
            window / 20
        )


def test_what_a_right_exit_prepares_is_free_and_grows_up_to_the_overlap_budget():
    """Equation 10, figure 3a: the suffix has the time of four draft forwards here."""
    pairs = with_exits(synthetic_pairs(5, 90, 0.97, 0.6, 0.5, seed=1), {10: 0.3})
    windows = 1, 2, 3, 4, 12
    rows = list(by_window(question(pairs), {}, 1, [8.0], LAYERS, windows))
    right, serial = (
        {row["window"]: row for row in rows if row["predicts"] == name} for name in ("right exit", "serial")
    )
    assert all(right[window]["critical"] == 0 for window in windows)
    tokens = [right[window]["tokens_a_step"] for window in windows]
    assert np.all(np.diff(tokens[:3]) > 0.7) and np.ptp(tokens[3:]) < 0.7
    assert serial[12]["tokens_a_step"] > 1.5 * tokens[-1] and serial[12]["critical"] == pytest.approx(1.5)


def test_the_later_a_right_exit_speaks_the_less_it_gives():
    pairs = made({5: 0.3, 15: 0.3})
    early, late = bounds(question(pairs), [{}], 1, [8.0], LAYERS)
    assert (early["exit"], late["exit"]) == ("5/20", "15/20")
    assert early["over_plain"].value > 1.2 * late["over_plain"].value > 1.2
    assert early["speed_over_draft"].value > 1


def test_the_planner_is_behind_no_fixed_shape():
    pairs = synthetic_pairs(8, 60, 0.7, 0.6, 0.5, seed=1)
    rows = list(
        against_shapes(question(pairs, Times(lambda rows: 1.0, lambda rows: 0.1), 15), [{}], 1, [8.0])
    )
    assert {row["shape"] for row in rows} == set(shapes())
    assert all(row["planner_over"].high >= 1 for row in rows if row["shape"] != PLANNER)
    found = {row["shape"]: row["tokens_a_step"].value for row in rows}
    assert found["dynamic, gamma = 0.25 C"] < found["dynamic split"]
