"""The speculation length: gains against costs, learned from what happened."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from datastore_service.protocol.tree import EMPTY_TREE, DraftTree, Tier
from sglang_patches.step.acceptance import Acceptance
from sglang_patches.step.length import (
    PLAIN_STREAK,
    PROBE_STEPS,
    STEADY_STEPS,
    LengthPolicy,
    StepTimes,
    _best_behind,
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
    assert width_of(policy, [_chain([0.9] * 6)]) == 8
    assert width_of(policy, [EMPTY_TREE]) == 1


@pytest.mark.parametrize(
    ("widths", "limit", "batch", "rows"),
    [
        ((16,), math.inf, 48, 768),
        (WIDTHS, math.inf, 48, 768),
        (WIDTHS, 512, 48, 512),
        (WIDTHS, 512, 600, 600),
        (WIDTHS, 512, 4, 64),
    ],
)
def test_most_rows_of_a_step(widths, limit, batch, rows):
    assert LengthPolicy(widths, lambda rows: 1.0, limit).most_rows(batch) == rows


@pytest.mark.parametrize(("batch", "width"), [(1, 16), (2, 16), (3, 8), (32, 1), (48, 1)])
def test_the_rows_of_all_requests_of_a_step_are_bounded(batch, width):
    policy = LengthPolicy(WIDTHS, lambda rows: 1.0, most_rows=32)
    assert width_of(policy, [_chain([0.99] * 15)] * batch) == width <= policy.most_rows(batch) / batch


def test_rows_that_cost_in_proportion_leave_no_draft():
    policy = LengthPolicy(WIDTHS, lambda rows: float(rows))
    assert width_of(policy, [_chain([0.3] * 15)] * 8) == 1


def width_of(policy, trees):
    """The rows of each request of the next step, which all have as many."""
    (width,) = set(policy.choose(trees).tolist())
    return width


def observe(times, batch, width, seconds):
    times.observe(batch, batch * width, seconds)


def affine(batch, width):
    """Milliseconds of a step as measured on two cores: 45, and 1.6 a row."""
    return 45 + 1.6 * batch * width


def learned(cells, linear_seconds=lambda rows: 1.0, truth=affine, rounds=30):
    """Step times after so many visits of the cells, one after the other."""
    times = StepTimes(linear_seconds)
    for _ in range(rounds):
        for cell in cells:
            observe(times, *cell, truth(*cell))
    return times


def ratio(times, batch, width):
    """Of a step with this width over a plain one."""
    plain, drafted = times.seconds(batch, [batch, batch * width])
    return drafted / plain


def true_ratio(batch, width):
    return affine(batch, width) / affine(batch, 1)


def test_before_anything_is_measured_the_linear_layers_tell_widths_apart():
    steep = StepTimes(lambda rows: max(8.0, rows))
    flat = StepTimes(lambda rows: 8.0)
    assert ratio(steep, 8, 16) > 5 > 2 > ratio(flat, 8, 16) > 1


def test_measured_ratios_correct_the_prediction():
    tree, policy = _chain([0.5] * 15), LengthPolicy(WIDTHS, lambda rows: 1.0)
    assert width_of(policy, [tree] * 8) > 1
    for _ in range(20):
        for width in (1, 16):
            observe(policy.times, 8, width, affine(8, width) + 30 * 8 * width)
    assert width_of(policy, [tree] * 8) == 1


@pytest.mark.parametrize("slope", [lambda rows: 1.0, float])
def test_what_some_widths_teach_holds_for_others(slope):
    times = learned([(8, 1), (8, 4), (8, 16)], slope)
    for width in (2, 8, 12):
        assert ratio(times, 8, width) == pytest.approx(true_ratio(8, width), rel=0.1)
    assert ratio(times, 7, 8) == pytest.approx(true_ratio(7, 8), rel=0.1)


def test_more_rows_never_take_less():
    times = learned([(8, 1), (8, 4)], truth=lambda batch, width: 80 - 10 * width)
    rows = [8 * width for width in WIDTHS]
    assert times.seconds(8, rows) == sorted(times.seconds(8, rows))


def test_a_shapes_first_step_does_not_count():
    times = learned([(8, 1), (8, 4)])
    before = ratio(times, 8, 16)
    observe(times, 8, 16, 9000.0)
    observe(times, 8, 1, affine(8, 1))
    assert ratio(times, 8, 16) == before


def test_a_pace_that_changed_at_another_batch_size_changes_no_comparison():
    """What went wrong before: the pace of a slow minute at batch 1 was taken for that of a new width at batch 8, whose time
    then looked short, and stayed so while that width ran."""
    times = learned([(8, 3), (1, 1), (1, 16)])
    for slowness in np.linspace(1.0, 4.0, 300):
        observe(times, 1, 16, affine(1, 16) * slowness)
    for _ in range(5):
        for cell in ((8, 16), (8, 16), (8, 3)):
            observe(times, *cell, affine(*cell))
    assert ratio(times, 8, 16) == pytest.approx(true_ratio(8, 16), rel=0.1)


def test_steps_on_either_side_of_a_break_teach_no_ratio():
    times = learned([(8, 1), (8, 4)])
    before = ratio(times, 8, 4)
    for _ in range(20):
        times.interrupted()
        observe(times, 8, 1, 50.0)
        times.interrupted()
        observe(times, 8, 4, 240.0)
    assert ratio(times, 8, 4) == before


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
    times = learned([(8, 1), (8, 4)])
    for cell, milliseconds in (((8, 1), 5000.0), ((8, 4), affine(8, 4))):
        observe(times, *cell, milliseconds)
    assert ratio(times, 8, 4) == pytest.approx(true_ratio(8, 4), rel=0.1)


def test_a_slower_machine_changes_no_comparison():
    times = learned([(8, 1), (8, 4)])
    for cell in [(8, 1)] * 100 + [(8, 4)] + [(8, 1)] * 5:
        observe(times, *cell, 2 * affine(*cell))
    assert ratio(times, 8, 4) == pytest.approx(true_ratio(8, 4), rel=0.1)


def test_a_lasting_change_is_followed():
    times = learned([(8, 1), (8, 4)], rounds=200)
    for _ in range(60):
        observe(times, 8, 1, 50.0)
        observe(times, 8, 4, 120.0)
    assert ratio(times, 8, 4) == pytest.approx(2.4, rel=0.1)


def test_long_service_at_one_batch_size_leaves_no_doubt_without_bound():
    """What batch 8 alone cannot tell apart must not grow so uncertain that one disturbed pair elsewhere upsets it."""
    times = learned([(8, 1), (8, 4), (1, 1), (1, 16)], rounds=2)
    for _ in range(10_000):
        for cell in ((8, 1), (8, 4)):
            observe(times, *cell, affine(*cell))
    observe(times, 1, 1, affine(1, 1))
    observe(times, 1, 16, 10 * affine(1, 16))
    assert ratio(times, 8, 4) == pytest.approx(true_ratio(8, 4), rel=0.05)


def chosen(policy, trees, milliseconds, steps):
    """Widths of so many steps on a machine whose step times are given by (step, batch, width)."""
    widths = []
    for step in range(steps):
        width = width_of(policy, trees if policy.wants_draft(len(trees)) else [EMPTY_TREE] * len(trees))
        observe(policy.times, len(trees), width, milliseconds(step, len(trees), width))
        widths.append(width)
    return widths


def test_a_plain_step_that_looked_slow_at_first_is_tried_again():
    """What went wrong before: the only plain steps fell into a slow second, and a draft that rarely matched was verified for
    minutes because a plain step was thought to be as slow."""
    policy = LengthPolicy(WIDTHS, lambda rows: 1.0)
    for _ in range(5):
        for width, slowness in ((2, 1.0), (1, 2.5)):
            observe(policy.times, 8, width, slowness * affine(8, width))
    assert ratio(policy.times, 8, 2) < true_ratio(8, 2)
    widths = chosen(policy, [_chain([0.15] * 8)] * 8, lambda step, *cell: affine(*cell), 400)
    assert widths[-100:].count(1) > 90


def test_a_width_that_is_always_chosen_is_compared_now_and_then():
    free = LengthPolicy(WIDTHS, lambda rows: 1.0)
    widths = chosen(free, [_chain([0.9] * 7)], lambda *step: 50.0, 4 * STEADY_STEPS)
    assert set(widths) == {1, 8} and 2 <= widths.count(1) <= 4
    dear = LengthPolicy(WIDTHS, float)
    widths = chosen(dear, [_chain([0.3] * 7)] * 8, lambda step, batch, width: batch * width, 8 * STEADY_STEPS)
    assert set(widths) == {1, 2} and 1 <= widths.count(2) <= 8


def test_a_draft_must_promise_more_than_noise():
    policy = LengthPolicy((1, 2), lambda rows: 1.0)
    assert width_of(policy, [_chain([0.04])]) == 1
    assert width_of(policy, [_chain([0.3])]) == 2


def test_one_tenants_outcomes_say_nothing_of_anothers():
    acceptance, tree = Acceptance(), _chain([0.9])
    before = acceptance.estimate([tree], ["b"])
    outcome = SimpleNamespace(
        request=SimpleNamespace(tenant="a"), tree=tree, accepted=np.zeros(len(tree), np.bool_)
    )
    acceptance.learn([outcome] * 100)
    refused, untouched = acceptance.estimate([tree, tree], ["a", "b"]).reshape(2, -1)
    assert refused[0] < 0.2 and untouched.tolist() == before.tolist()


def test_acceptance_follows_the_outcomes():
    acceptance, tree = Acceptance(), _chain([0.95])
    before = acceptance.estimate([tree], [""])[0]
    for _ in range(500):
        acceptance.observe("", [tree], np.array([False]))
    assert before > 0.9 and acceptance.estimate([tree], [""])[0] < 0.1


def test_a_batchs_expected_tokens_are_those_of_each_tree_added():
    """Bit for bit, as one tree after the other would add them up."""
    rng = np.random.default_rng(0)
    policy = LengthPolicy(WIDTHS, lambda rows: 1.0)
    trees = [_chain(rng.random(size)) for size in (3, 0, 15, 1, 7)]
    for tree in trees:
        policy.acceptance.observe("", [tree], rng.random(len(tree)) < 0.5)
    gains = np.zeros(16)
    gains[0] = len(trees)
    for tree in trees:
        gains[1 : len(tree) + 1] += policy.acceptance.estimate([tree], [""])
    assert (
        policy._tokens(trees, np.array([len(tree) for tree in trees]), [""] * len(trees)).tolist()
        == np.cumsum(gains).tolist()
    )


def test_where_one_width_is_possible_nothing_is_estimated():
    """A fixed width, or no draft: the estimate would be thrown away, and the launch waits for it."""
    policy, fixed = LengthPolicy(WIDTHS, lambda rows: 1.0), LengthPolicy((16,), lambda rows: 1.0)
    policy.acceptance = fixed.acceptance = None  # raises where it is asked
    assert width_of(policy, [EMPTY_TREE] * 4) == 1
    assert width_of(fixed, [_chain([0.9] * 6)] * 4) == 16 and fixed.wants_draft(4)


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


def test_waiting_for_the_draft_side_says_nothing_of_rows():
    seen = []
    policy = LengthPolicy((1, 4), lambda rows: rows)
    policy.times.observe = lambda *of: seen.append(of)
    policy.step_started(2, 2, at=1.0)
    assert policy.step_started(2, 8, at=2.5, waited=1.25) == (2, 2, 1.5)
    assert seen == [(2, 2, 0.25)]


def by_request(linear_seconds=lambda rows: 1.0):
    return LengthPolicy(WIDTHS, linear_seconds, by_request=True)


def test_rows_go_to_the_request_that_has_the_likelier_nodes():
    policy = by_request(lambda rows: max(6.0, rows))
    sure, unlikely = _chain([0.99**depth for depth in range(1, 13)]), _chain([0.05] * 12)
    assert policy.choose([unlikely, sure, EMPTY_TREE]).tolist() == [1, 13, 1]


def test_free_rows_take_all_trees_and_no_padding():
    trees = [_chain([0.9] * size) for size in (7, 2, 0, 15)]
    assert by_request().choose(trees).tolist() == [8, 3, 1, 16]


def test_rows_of_each_request_that_cost_in_proportion_leave_no_draft():
    assert by_request(float).choose([_chain([0.3] * 15)] * 8).tolist() == [1] * 8


def test_without_trees_no_request_has_more_than_its_root():
    assert by_request().choose([EMPTY_TREE] * 4).tolist() == [1] * 4


def test_a_node_is_worth_what_is_likelier_behind_it():
    """Learned acceptance of one source may make a later node likelier than an earlier one; a tree keeps its first nodes."""
    assert _best_behind(np.array([0.2, 0.1, 0.4, 0.3, 0.9]), np.array([3, 0, 2])).tolist() == [
        0.4,
        0.4,
        0.4,
        0.9,
        0.9,
    ]


def test_no_other_share_of_as_many_rows_promises_more():
    """By trying all of them."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        sizes = rng.integers(0, 5, 3)
        trees = [_chain(np.sort(rng.random(size))[::-1]) for size in sizes]
        policy = by_request(lambda rows: 4.0 + rows)
        given = policy.choose(trees) - 1
        gains = [policy.acceptance.estimate([tree], [""]) if len(tree) else np.zeros(0) for tree in trees]
        others = [
            sum(of[:count].sum() for of, count in zip(gains, counts, strict=True))
            for counts in np.ndindex(*(sizes + 1))
            if sum(counts) == given.sum()
        ]
        assert sum(of[:count].sum() for of, count in zip(gains, given, strict=True)) == pytest.approx(
            max(others)
        )


def test_rows_of_requests_that_are_always_chosen_are_compared_now_and_then():
    policy, seen = by_request(), []
    for _ in range(4 * STEADY_STEPS):
        seen.append(int(policy.choose([_chain([0.9] * 7)] * 2).sum()))
    assert set(seen) == {2, 16} and 2 <= seen.count(2) <= 4


def test_rows_of_requests_that_do_not_pay_are_compared_with_a_draft_for_each_now_and_then():
    """One row more than a plain step's would say nothing of what a row costs."""
    policy, seen = by_request(float), []
    for _ in range(4 * STEADY_STEPS):
        seen.append(int(policy.choose([_chain([0.3] * 7)] * 8).sum()))
    assert set(seen) == {8, 16} and 2 <= seen.count(16) <= 4


def test_rows_that_differ_from_step_to_step_are_compared_with_a_plain_step_too():
    policy, seen = by_request(), []
    for step in range(4 * STEADY_STEPS):
        seen.append(int(policy.choose([_chain([0.9] * (3 + step % 5))] * 2).sum()))
    assert 2 <= seen.count(2) <= 4 and len(set(seen)) > 3
