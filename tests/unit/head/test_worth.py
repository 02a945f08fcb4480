"""A step waits for the head where that brings more tokens a second."""

import numpy as np

from sglang_patches.head.source import ALIKE, PROBE_STEPS, HeadWorth


def learned(gain, draft=0.4, step=1.0, retrieved=5.0):
    worth = HeadWorth()
    for _ in range(ALIKE):
        worth.drafted(retrieved, retrieved + gain, draft)
        worth.step_took(step)
    return worth


def test_until_it_is_known_the_head_drafts():
    worth = HeadWorth()
    assert not worth.doubtful and worth.pays(8.0)


def test_a_head_that_adds_little_to_a_long_find_is_left_out():
    worth = learned(gain=0.1)
    assert worth.doubtful and not worth.pays(5.0)
    assert worth.pays(1.0), "nothing is known of steps where retrieval finds nothing"


def test_a_head_that_adds_much_is_asked_beside_retrieval():
    assert not learned(gain=4.0).doubtful


def test_now_and_then_it_drafts_all_the_same():
    worth = learned(gain=0.0)
    drafted = [worth.pays(5.0) for _ in range(3 * (PROBE_STEPS + 1))]
    assert drafted == 3 * ([False] * PROBE_STEPS + [True])


def test_the_choice_is_the_faster_one():
    rng = np.random.default_rng(1)
    for _ in range(200):
        gain, draft, retrieved = rng.uniform(0, 4), rng.uniform(0.05, 0.9), rng.uniform(1, 8)
        faster = (retrieved + gain) / 1.0 >= retrieved / (1 - draft)
        assert learned(gain, draft, 1.0, retrieved).pays(retrieved) is bool(faster)


def test_steps_without_a_draft_say_nothing_of_what_it_costs():
    worth = learned(gain=0.5, draft=0.05)
    for _ in range(200):
        worth.step_took(0.06)
    assert worth.pays(5.0)
