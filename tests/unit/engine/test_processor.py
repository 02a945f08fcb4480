"""Kernels that were compiled for a level of x86-64."""

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest
from numba.core import config

from datastore_service.client import open_datastore
from datastore_service.engine import processor
from datastore_service.protocol.types import Namespace

CHECKOUT = Path(__file__).parents[3]


def test_a_processor_below_the_level_is_refused_by_what_it_lacks(monkeypatch):
    host = dict(llvm.get_host_cpu_features()) | {"avx2": False, "fma": False}
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: host)
    for level in ("x86-64-v3", "x86-64-v4"):
        monkeypatch.setattr(config, "CPU_NAME", level)
        with pytest.raises(
            ValueError, match=rf"^NUMBA_CPU_NAME: .* {level}, .* has no (\S+, )*avx2, (\S+, )*fma"
        ):
            processor.check_processor()
    for level in ("x86-64-v2", None, "znver4"):
        monkeypatch.setattr(config, "CPU_NAME", level)
        processor.check_processor()


def test_the_command_refuses_it_in_one_line():
    """No processor has all of what this level asks for."""
    code = (
        "from datastore_service.engine import processor\n"
        "processor.LEVELS['x86-64-v5'] = ('xop', 'amx-tf32')\n"
        "from datastore_service.cli.main import app\n"
        "app()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve"],
        env=os.environ | {"NUMBA_CPU_NAME": "x86-64-v5", "NUMBA_CPU_FEATURES": ""},
        cwd=CHECKOUT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the kernels are for x86-64-v5, and this processor has no" in " ".join(done.stderr.split())


def test_a_worker_refuses_it(monkeypatch):
    monkeypatch.setitem(processor.LEVELS, "x86-64-v5", ("xop", "amx-tf32"))
    monkeypatch.setattr(config, "CPU_NAME", "x86-64-v5")
    with pytest.raises(ValueError, match="the kernels are for x86-64-v5"):
        open_datastore("embedded", Namespace("m", "t"), 10)


def test_llvm_knows_every_feature():
    assert set(processor.features("x86-64-v4")) <= llvm.get_host_cpu_features().keys()
