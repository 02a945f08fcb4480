"""The soak (tests/soak): seconds of it with every change, ten minutes of it in the long run."""

import secrets
from pathlib import Path

import pytest

from tests.soak.run import show, soak

# Each is a check that must have been made, however slow the machine.
CHECKS = ("found", "gone", "recalled", "closed sessions", "broken streams")


def check(minutes: float, seed: int, folder: Path, **pace: tuple[float, float]) -> None:
    summary = soak(minutes, seed, folder, **pace)
    show(summary)
    assert summary["violations"] == []
    assert summary["disturbances"] and summary["starts"] >= 2 and summary["segment_files"] > 0
    assert all(summary["counts"].get(name) for name in CHECKS), summary["counts"]


def test_some_seconds(tmp_path):
    check(0.06, 7, tmp_path, between=(0.2, 1.5))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_minutes(tmp_path):
    check(10.0, secrets.randbelow(1 << 31), tmp_path)
