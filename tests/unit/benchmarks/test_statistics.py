"""The arithmetic behind the benchmark tables."""

import numpy as np
import pytest

from benchmarks.prompts import SHIPPED, load_prompts, spec_bench_category
from benchmarks.report.statistics import FEW, ratio_of_sums, throughput_ratio


def test_ratio_of_sums_and_its_interval():
    interval = ratio_of_sums([10, 30, 20], [5, 10, 15])
    assert interval.value == pytest.approx(2.0) and interval.low < 20 / 15 < 3.0 < interval.high
    many = ratio_of_sums([10, 30, 20] * FEW, [5, 10, 15] * FEW)
    assert many.value == pytest.approx(2.0) and 20 / 15 < many.low < many.value < many.high < 3.0


@pytest.mark.parametrize(("groups", "least"), [(2, 0.92), (3, 0.92), (6, 0.92), (FEW, 0.85), (40, 0.9)])
def test_intervals_hold_the_true_ratio_about_as_often_as_they_say(groups, least):
    rng = np.random.default_rng(1)

    def holds() -> bool:
        tokens, base = rng.lognormal(0.0, 0.3, (2, groups))
        interval = throughput_ratio(1.5 * tokens, np.ones(groups), base, np.ones(groups))
        return interval.low <= 1.5 <= interval.high

    assert least <= np.mean([holds() for _ in range(400)]) <= 0.98


def test_identical_arms_have_ratio_one_with_no_spread():
    tokens, seconds = [10, 20, 30], [1.0, 2.5, 2.0]
    interval = throughput_ratio(tokens, seconds, tokens, seconds)
    assert [interval.value, interval.low, interval.high] == pytest.approx([1.0] * 3)


def test_one_group_has_no_interval():
    interval = throughput_ratio([10], [1.0], [10], [2.0])
    assert (interval.low, interval.high, str(interval)) == (None, None, "2.00")


def test_pairing_cancels_slow_groups():
    """A group that is ten times slower on both sides does not widen the interval."""
    interval = throughput_ratio([10] * 6, [1, 10, 1, 10, 1, 10], [10] * 6, [2, 20, 2, 20, 2, 20])
    assert interval.low == pytest.approx(2.0) and interval.high == pytest.approx(2.0)


def test_the_categories_of_mt_bench_are_one_task():
    assert spec_bench_category("roleplay") == "mt_bench" and spec_bench_category("rag") == "rag"


def test_shipped_prompts_cover_several_categories():
    assert len({prompt.category for prompt in load_prompts(SHIPPED)}) >= 6
