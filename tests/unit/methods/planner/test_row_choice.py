"""How many rows a draft forward has, by what they promise and what they cost."""

import numpy as np
import pytest

from sglang_patches.draft_side.seams import AllRows
from sglang_patches.methods.planner import RowsByValue


def taught(seconds, sizes=(1, 4, 16)):
    choice = RowsByValue()
    for rows in sizes * 20:
        choice.took(rows, seconds(rows))
    return choice


def best(values, seconds):
    """By trying all."""
    rates = [sum(values[:rows]) / seconds(rows) for rows in range(1, len(values) + 1)]
    return int(np.argmax(rates)) + 1


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.1, 0.9])
@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
def test_the_number_with_the_most_value_a_second(slope, decay):
    values = decay ** np.arange(24)
    assert taught(lambda rows: 1.0 + slope * rows).rows(values) == best(
        values, lambda rows: 1.0 + slope * rows
    )


def test_rows_that_cost_nothing_are_all_run():
    assert taught(lambda rows: 2.0).rows(np.array([0.9, 0.1, 1e-3])) == 3
    assert AllRows().rows(np.array([0.9, 1e-9])) == 2


def test_before_anything_is_measured_all_are_run():
    assert RowsByValue().rows(np.array([0.5, 0.2, 0.1])) == 3


def test_the_line_is_found():
    seconds = taught(lambda rows: 0.02 + 0.003 * rows).seconds(np.array([1, 8, 24]))
    assert seconds == pytest.approx([0.023, 0.044, 0.092], rel=1e-3)


def test_one_size_tells_no_slope():
    assert taught(lambda rows: 0.5, sizes=(8,)).seconds(np.array([1, 100])) == pytest.approx([0.5, 0.5])


def test_noise_does_not_make_rows_pay_for_themselves():
    """More rows took less, by chance: no row takes less than none."""
    seconds = taught(lambda rows: 1.0 / rows).seconds(np.arange(1, 25))
    assert (np.diff(seconds) >= 0).all() and (seconds > 0).all()


def test_a_machine_that_gets_slower_is_followed():
    choice = taught(lambda rows: 1.0)
    for rows in (1, 4, 16) * 100:
        choice.took(rows, 1.0 + rows)
    assert choice.seconds(np.array([9]))[0] == pytest.approx(10.0, rel=0.05)
