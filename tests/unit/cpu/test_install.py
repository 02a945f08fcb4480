"""What `install` does to a process, each case in an interpreter of its own."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang")


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_nothing_is_imported_before_install():
    code = """
import json, sys
import sglang_patches.cpu
print(json.dumps([m for m in sys.modules if m.startswith(("torch", "sglang.", "numba", "sglang_patches.cpu."))]))
"""
    assert json.loads(_python(code)) == []


_INSTALLED = """
import sys
import sglang_patches.cpu as cpu
cpu.install(); cpu.install()
import common_ops, torch
"""


def test_installing_twice_registers_once():
    code = _INSTALLED + (
        "from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES as c\n"
        "print(c.count(cpu.ATTENTION_BACKEND), sum('import_path' in p for p in sys.path))"
    )
    assert _python(code, SGLANG_USE_CPU_ENGINE="1") == "1 1"


def test_a_missing_operator_is_named_and_still_probes_as_absent():
    code = (
        _INSTALLED
        + """
print(hasattr(torch.ops.sgl_kernel, "convert_weight_packed"), hasattr(torch.ops.sgl_kernel, "verify_tree_greedy_cpu"))
try:
    torch.ops.sgl_kernel.shm_allreduce
except AttributeError as error:
    print(error)
"""
    )
    out = _python(code, SGLANG_USE_CPU_ENGINE="1")
    assert out == "specstore: CPU operator sgl_kernel.shm_allreduce is not implemented"


def test_operators_run_through_the_torch_namespace():
    code = (
        _INSTALLED
        + """
table = torch.arange(20, dtype=torch.int32).view(2, 10)
out = torch.zeros(4, dtype=torch.int64)
torch.ops.sgl_kernel.assign_extend_cache_locs_cpu(
    torch.tensor([1, 0]), table, torch.tensor([2, 0]), torch.tensor([5, 1]), out, 10)
print(out.tolist())
"""
    )
    assert _python(code, SGLANG_USE_CPU_ENGINE="1") == "[12, 13, 14, 0]"


_SPAWN = """
import multiprocessing, sys
def child():
    import common_ops, torch
    print(hasattr(torch.ops.sgl_kernel, "verify_tree_greedy_cpu"), flush=True)
if __name__ == "__main__":
    import sglang_patches.cpu
    sglang_patches.cpu.install()
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start(); process.join(); sys.exit(process.exitcode)
"""


def test_spawned_processes_find_the_operators(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(_SPAWN)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "True", done.stderr[-3000:]


def test_every_hook_finds_its_target():
    code = (
        _INSTALLED
        + """
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
print(sorted(set(HookRegistry._hooks) - HookRegistry._patched), len(HookRegistry._hooks))
"""
    )
    assert _python(code, SGLANG_USE_CPU_ENGINE="1") == "[] 10"
