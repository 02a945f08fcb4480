"""SSSD does with recorded sessions what it did before the methods got a skeleton: the same entries, trees, rows and tokens."""

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

from tests.unit.workers.recorded_sessions import CASES, RECORDED, play  # noqa: E402


@pytest.mark.parametrize("name", CASES)
def test_the_same_entries_trees_rows_and_tokens(plugin, name):
    assert play(name) == (RECORDED / f"{name}.txt").read_text().splitlines()
