"""The speculation length: gains against costs, learned from what happened."""

import numpy as np
import pytest

from datastore_service.engine.tree import EMPTY_TREE, DraftTree, Tier
from sglang_patches.workers.length import (
    MOST_STALE,
    OPTIMISM,
    PLAIN_STREAK,
    PROBE_STEPS,
    STALE_STEPS,
    TRUSTED,
    AcceptanceModel,
    LengthPolicy,
    StepTimes,
)

WIDTHS = (1, 2, 4, 8, 16)


def _chain(probs):
    size = len(probs)
    return DraftTree(
        np.arange(size, dtype=np.int32),
        np.arange(-1, size - 1, dtype=np.int32),
        np.array(probs, np.float32),
        np.full(size, Tier.SESSION, np.uint8),
    )


def test_free_rows_take_the_whole_tree_and_no_padding():
    policy = LengthPolicy(WIDTHS, lambda rows: 1.0)
    assert policy.choose([_chain([0.9] * 6)]) == 8
    assert policy.choose([EMPTY_TREE]) == 1


def test_rows_that_cost_in_proportion_leave_no_draft():
    policy = LengthPolicy(WIDTHS, lambda rows: float(rows))
    assert policy.choose([_chain([0.3] * 15)] * 8) == 1


def test_measured_times_replace_the_prediction():
    policy = LengthPolicy(WIDTHS, lambda rows: 1.0)
    tree = _chain([0.5] * 15)
    assert policy.choose([tree]) == 16
    for _ in range(TRUSTED):
        policy.times.observe(1, 1, 1.0)
        policy.times.observe(1, 16, 20.0)
        policy.times.observe(1, 8, 1.1)
    assert policy.choose([tree]) == 8


def _times(linear_seconds, measured, rounds=TRUSTED):
    times = StepTimes(linear_seconds)
    for _ in range(rounds):
        for (batch, width), seconds in measured.items():
            times.observe(batch, width, seconds)
    return times


def test_unmeasured_widths_add_what_the_linear_layers_add():
    times = _times(lambda rows: max(8, rows) / 8, {(1, 8): 3.0})
    assert times.seconds(1, [4, 8, 16]) == pytest.approx([3.0, 3.0, 4.0])
    assert times.seconds(4, [8]) == pytest.approx([6.0])


def test_fewer_rows_never_take_less_than_their_share():
    times = _times(float, {(1, 8): 3.0})
    assert times.seconds(1, [4]) == pytest.approx([1.5])


def test_between_measured_widths_times_are_interpolated():
    times = _times(lambda rows: 1.0, {(8, 1): 50.0, (8, 16): 120.0})
    assert times.seconds(8, [2, 8]) == pytest.approx([50 + 70 * 8 / 120, 50 + 70 * 56 / 120], rel=0.001)


def test_a_cell_that_was_not_visited_for_long_is_tried_again():
    times = _times(lambda rows: 1.0, {(1, 1): 1.0, (1, 8): 9.0})
    for _ in range(STALE_STEPS):
        times.observe(1, 1, 1.0)
    assert times.seconds(1, [8]) == pytest.approx([9.0 * OPTIMISM])
    for _ in range(9 * STALE_STEPS):
        times.observe(1, 1, 1.0)
    assert times.seconds(1, [8]) == pytest.approx([9.0 * OPTIMISM**MOST_STALE])


def test_a_shapes_first_step_does_not_count():
    times = _times(lambda rows: 1.0, {(1, 1): 1.0})
    times.observe(1, 8, 60.0)
    for _ in range(TRUSTED):
        times.observe(1, 1, 1.0)
        times.observe(1, 8, 2.0)
    assert times.seconds(1, [8]) == pytest.approx([2.0], rel=0.01)


def test_a_pace_that_changed_at_another_batch_size_changes_no_comparison():
    """What went wrong before: the pace of a slow minute at batch 1 was taken for that of a new width at batch 8, whose time
    then looked short, and stayed so while that width ran."""
    times = _times(lambda rows: 1.0, {(8, 3): 62.0, (1, 1): 50.0, (1, 16): 68.0}, rounds=20)
    for slowness in np.linspace(1.0, 4.0, 300):
        times.observe(1, 16, 68.0 * slowness)
    for _ in range(10):
        times.observe(8, 16, 210.0)
    for _ in range(5):
        times.observe(8, 3, 62.0)
        times.observe(8, 16, 210.0)
        times.observe(8, 16, 210.0)
    narrow, wide = times.seconds(8, [3, 16])
    assert wide / narrow == pytest.approx(210 / 62, rel=0.1)


def test_steps_on_either_side_of_a_break_teach_no_ratio():
    times = _times(lambda rows: 1.0, {(8, 1): 50.0, (8, 4): 80.0}, rounds=20)
    for _ in range(20):
        times.interrupted()
        times.observe(8, 1, 50.0)
        times.interrupted()
        times.observe(8, 4, 240.0)
    assert times.seconds(8, [1, 4]) == pytest.approx([50.0, 80.0], rel=0.05)


def test_a_prefill_or_an_idle_gap_is_such_a_break():
    policy = LengthPolicy(WIDTHS, lambda rows: 1.0)
    broken = []
    policy.times.interrupted = lambda: broken.append(True)
    policy.step_started(1, 1)
    assert policy.step_started(1, 4) is not None and not broken
    assert policy.step_started(1, 1, comparable=False) is None and len(broken) == 1
    policy.interrupted()
    assert policy.step_started(1, 1) is None and len(broken) == 2


def test_one_step_that_was_interrupted_moves_little():
    times = _times(lambda rows: 1.0, {(8, 1): 50.0, (8, 4): 80.0}, rounds=20)
    times.observe(8, 1, 5000.0)
    times.observe(8, 4, 80.0)
    assert times.seconds(8, [1, 4]) == pytest.approx([50.0, 80.0], rel=0.1)


def test_a_slower_machine_changes_no_comparison():
    times = _times(lambda rows: 1.0, {(8, 1): 50.0, (8, 4): 80.0}, rounds=20)
    for _ in range(100):
        times.observe(8, 1, 100.0)
    times.observe(8, 4, 160.0)
    for _ in range(5):
        times.observe(8, 1, 99.0)
    assert times.seconds(8, [1, 4]) == pytest.approx([50.0, 80.0], rel=0.05)


def test_a_cell_follows_a_lasting_change_of_its_own():
    times = _times(lambda rows: 1.0, {(8, 1): 50.0, (8, 4): 80.0})
    for _ in range(45):
        for _ in range(4):
            times.observe(8, 1, 50.0)
        times.observe(8, 4, 120.0)
    plain, drafted = times.seconds(8, [1, 4])
    assert drafted / plain == pytest.approx(2.4, rel=0.1)


def test_a_draft_must_promise_more_than_noise():
    policy = LengthPolicy((1, 2), lambda rows: 1.0)
    assert policy.choose([_chain([0.04])]) == 1
    assert policy.choose([_chain([0.3])]) == 2


def test_acceptance_follows_the_outcomes():
    model, tree = AcceptanceModel(), _chain([0.95])
    before = model.estimate(tree)[0]
    for _ in range(500):
        model.observe(tree, np.array([False]))
    assert before > 0.9 and model.estimate(tree)[0] < 0.1


def test_asking_becomes_rare_where_drafts_do_not_pay_and_recovers():
    policy = LengthPolicy(WIDTHS, lambda rows: float(rows))
    useless = _chain([0.1] * 4)
    for _ in range(PLAIN_STREAK):
        assert policy.wants_draft(2)
        policy.choose([useless] * 2)
    asked = 0
    for _ in range(4 * PROBE_STEPS):
        asked += policy.wants_draft(2)
        policy.choose([EMPTY_TREE] * 2)
    assert asked == 4
    assert policy.wants_draft(1)  # other batch sizes are judged on their own
