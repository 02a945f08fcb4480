"""SGLang's Triton kernels and the attention backends around them, run on the CPU by Triton's interpreter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the extra `sglang` is not installed")

FOLDER = Path(__file__).parent / "interpreted"


def test_in_a_process_of_its_own():
    """Triton decides at its import whether it interprets, and this process may serve a CPU: SGLang asks at import too."""
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=600", str(FOLDER)]
    run = subprocess.run(
        command,
        cwd=FOLDER.parents[3],
        env=environment | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5_000:]
    assert " passed" in run.stdout, run.stdout
    assert "skipped" not in run.stdout or shutil.which("g++") is None, run.stdout
