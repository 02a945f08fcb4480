"""`cpu_engine_host_time.py` in a process of its own, because SGLang decides at import whether it serves on a CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_in_a_process_of_its_own():
    cases = Path(__file__).with_name("cpu_engine_host_time.py")
    words, environment = (
        [sys.executable, "-m", "pytest", "-q", str(cases)],
        os.environ | {"SGLANG_USE_CPU_ENGINE": "1"},
    )
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
