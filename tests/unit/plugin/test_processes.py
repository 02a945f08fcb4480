"""What SGLang's own ways in say on a CPU, each in a process as a user starts it: the table of symbols, and `sgl.Engine`."""

import os
import subprocess
import sys

import pytest

from tests.unit.plugin.model_config import write_config

pytest.importorskip("sglang")


def _python(*words: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=600
    )


def test_the_check_finds_every_symbol_on_a_cpu():
    done = _python("-m", "sglang_patches.check")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "cannot be" not in done.stdout and "missing" not in done.stdout


# Prints why `sgl.Engine` refuses each of the variables given.
ENGINE = """
import os, sys
import sglang as sgl
for variables in sys.argv[2:]:
    given = dict(variable.split("=") for variable in variables.split())
    os.environ |= given
    try:
        sgl.Engine(model_path=sys.argv[1], speculative_algorithm="SSSD", device="cpu")
    except ValueError as error:
        print(error)
    for name in given:
        del os.environ[name]
"""


def test_the_engine_refuses_a_bad_option_by_name(tmp_path):
    write_config(tmp_path)
    gone = tmp_path / "gone"
    bad = (
        "SPECSTORE_NODES=many",
        "SPECSTORE_DEADLINE_MS=nan",
        f"SPECSTORE_ENDPOINT=host:1 SPECSTORE_TLS_CA={gone}",
    )
    done = _python("-c", ENGINE, tmp_path, *bad)
    assert done.stdout.splitlines() == [
        "specstore option nodes: 'many' is not a valid int",
        "specstore option deadline_ms: nan is outside (0, 10000]",
        f"tls-ca: {gone}: No such file or directory",
    ], done.stderr[-3000:]
