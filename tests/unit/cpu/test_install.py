"""What `install` does to a process, each case in an interpreter of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")


COMPILED = Path(__file__).parent / "compiled_library"


def _python(code: str, folder: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
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
import json, sys
import sglang_patches.cpu as cpu
cpu.install(); cpu.install()
import common_ops, torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.plugins.hook_registry import HookRegistry

operators, seen = torch.ops.sgl_kernel, {}
seen["registered"] = ATTENTION_BACKEND_CHOICES.count(cpu.ATTENTION_BACKEND)
seen["probed"] = [hasattr(operators, name) for name in ("convert_weight_packed", "verify_tree_greedy_cpu")]
try:
    operators.shm_allreduce
except AttributeError as error:
    seen["missing"] = str(error)
table, slots = torch.arange(20, dtype=torch.int32).view(2, 10), torch.zeros(4, dtype=torch.int64)
operators.assign_extend_cache_locs_cpu(torch.tensor([1, 0]), table, torch.tensor([2, 0]), torch.tensor([5, 1]), slots, 10)
seen["slots"] = slots.tolist()
HookRegistry.apply_hooks()
seen["hooks"] = [sorted(set(HookRegistry._hooks) - HookRegistry._patched), len(HookRegistry._hooks)]
from sglang.srt.layers.vocab_parallel_embedding import get_masked_input_and_mask
from sglang.srt.speculative.spec_utils import select_top_k_tokens
best = torch.tensor([[0.6, 0.4], [0.9, 0.1]]), torch.tensor([[3, 4], [5, 6]])
tokens, *_ = select_top_k_tokens(1, *best, None, torch.tensor([[0.7, 0.3]]), 2)
part, _ = get_masked_input_and_mask(torch.tensor([5, 6]), 5, 9, 0, 9, 9)
seen["eager"] = [tokens.tolist(), part.tolist(), dict(torch._dynamo.utils.counters["frames"])]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def installed() -> dict:
    """What a process saw that installed twice; one for all tests, because SGLang takes ten seconds to import."""
    return json.loads(_python(_INSTALLED, SGLANG_USE_CPU_ENGINE="1"))


def test_installing_twice_registers_once(installed):
    assert installed["registered"] == 1


def test_a_missing_operator_is_named_and_still_probes_as_absent(installed):
    assert installed["probed"] == [False, True]
    assert installed["missing"] == "specstore: CPU operator sgl_kernel.shm_allreduce is not implemented"


def test_operators_run_through_the_torch_namespace(installed):
    assert installed["slots"] == [12, 13, 14, 0]


def test_every_hook_finds_its_target(installed):
    assert installed["hooks"] == [[], 16]


def test_nothing_is_compiled(installed):
    assert installed["eager"] == [[3, 4], [0, 1], {}]


def test_operators_are_for_those_who_ask_for_a_cpu():
    """On a machine whose GPU library does not load, SGLang asks for them too: there its own error must stay."""
    code = """
import sys
from pathlib import Path
try:
    import common_ops
except ImportError as error:
    print(error, "torch" in sys.modules)
"""
    assert _python(code, SGLANG_USE_CPU_ENGINE="0") == (
        "specstore serves on a CPU with SGLANG_USE_CPU_ENGINE=1 in the environment; it is not set False"
    )


def test_the_operators_are_there_where_the_compiled_library_loads():
    """As on a host with a GPU, whose CPU runs a draft model."""
    code = """
import sys, torch, sgl_kernel
assert not hasattr(torch.ops.sgl_kernel, "verify_tree_greedy_cpu")
import sglang_patches.cpu as cpu
cpu.install()
print(hasattr(torch.ops.sgl_kernel, "verify_tree_greedy_cpu"), sys.modules["common_ops"].__file__)
"""
    found, file = _python(code, COMPILED, SGLANG_USE_CPU_ENGINE="1").split()
    assert found == "True" and Path(file).parent == COMPILED
