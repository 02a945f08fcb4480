"""Methods do with recorded sessions what they did when the record was made: the same entries, messages, trees, rows and tokens."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")


def test_the_same_entries_messages_trees_rows_and_tokens(tmp_path):
    """In a process of its own: SGLang asks at its import whether it serves on a CPU."""
    from tests.unit.step.recorded_sessions import CASES, RECORDED

    command = [sys.executable, "-m", "tests.unit.step.recorded_sessions", str(tmp_path)]
    subprocess.run(command, env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}, check=True)
    for name in CASES:
        lines, expected = (
            (folder / f"{name}.txt").read_text().splitlines() for folder in (tmp_path, RECORDED)
        )
        assert lines == expected
