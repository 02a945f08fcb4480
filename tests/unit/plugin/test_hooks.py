"""Hooks of ours beside another plugin's, through SGLang's own registry and its loading of plugins.

Every case is a process of its own, forked from one that has imported SGLang.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.unit.plugin.model_config import write_config

pytest.importorskip("sglang")

from sglang_patches.host import versions  # noqa: E402

ENDING = versions.host.ABORT
FLAGS = "sglang.srt.server_args.ServerArgs.add_cli_args"

# What another plugin may do: its hooks are applied with everybody's, or it applies them itself.
OTHER_PLUGIN = """
import os
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def note(result, *arguments, **named):
    print("the other plugin's hook")

def register():
    HookRegistry.register(os.environ["HOOKED"], note, HookType.AFTER)
    if os.environ["APPLIES"] == "itself":
        HookRegistry.apply_hooks()
"""

CASES = {
    "nobody else": ("", "", "with all"),
    "an ending's, loaded before ours": ("before", ENDING, "with all"),
    "an ending's, loaded after ours": ("after", ENDING, "with all"),
    "a flag's, loaded before ours": ("before", FLAGS, "with all"),
    "a flag's, loaded after ours": ("after", FLAGS, "with all"),
    "a flag's, applied before ours": ("before", FLAGS, "itself"),
    "a flag's, applied after ours": ("after", FLAGS, "itself"),
}

# Writes a JSON line a case: what the launcher and the scheduler's process refuse, and whether the parser has our flags.
PARENT = """
import argparse, json, multiprocessing, os, sys
import sglang.srt.managers.scheduler
from sglang.srt.plugins import HookRegistry, load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

cases, folder, model = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]

def refusal(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def has_flags():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return "--specstore-endpoint" in parser.format_help()

def child(name, order, hooked, applies, answers):
    os.environ |= {"HOOKED": hooked, "APPLIES": applies}
    sys.path[:] = {"": sys.path, "before": [folder, *sys.path], "after": [*sys.path, folder]}[order]
    load_plugins()
    launcher = ServerArgs(model_path=model, speculative_algorithm="SSSD", device="cpu")
    seen = {"launcher": refusal(launcher.resolve_once), "flags": has_flags()}
    seen["scheduler"] = refusal(lambda: SpeculativeAlgorithm.from_string("SSSD").factory(launcher))
    seen["hooks"] = sorted(HookRegistry._hooks)
    answers.put((name, seen))

fork = multiprocessing.get_context("fork")
answers = fork.SimpleQueue()
for name, case in cases.items():
    process = fork.Process(target=child, args=(name, *case, answers))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{name}: exit status {process.exitcode}")
    print(json.dumps(answers.get()))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, dict]:
    """What each case saw."""
    folder, model = tmp_path_factory.mktemp("other-plugin"), tmp_path_factory.mktemp("model")
    metadata = folder / "other_plugin-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = other_plugin:register\n")
    (folder / "other_plugin.py").write_text(OTHER_PLUGIN)
    write_config(model)
    done = subprocess.run(
        [sys.executable, "-c", PARENT, json.dumps(CASES), folder, model],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def _refused(message: str | None, target: str) -> bool:
    return message is not None and target in message and "plugin other of other-plugin" in message


def test_alone_nothing_is_refused(seen):
    case = seen["nobody else"]
    assert (case["launcher"], case["scheduler"], case["flags"]) == (None, None, True)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_hooked_ending_is_refused_by_the_launcher_and_by_the_scheduler(seen, order):
    """SGLang applies it while plugins load, ours comes when the worker is made: the order of loading does not matter."""
    case = seen[f"an ending's, loaded {order} ours"]
    assert _refused(case["launcher"], ENDING) and _refused(case["scheduler"], ENDING)


@pytest.mark.parametrize("order", ["before", "after"])
def test_hooks_that_are_applied_together_are_both_in_place(seen, order):
    case = seen[f"a flag's, loaded {order} ours"]
    assert (case["launcher"], case["flags"]) == (None, True)


def test_a_flag_that_was_hooked_and_applied_before_ours_is_refused(seen):
    case = seen["a flag's, applied before ours"]
    assert not case["flags"] and _refused(case["launcher"], FLAGS)


def test_a_flag_that_is_applied_after_ours_is_in_place(seen):
    case = seen["a flag's, applied after ours"]
    assert (case["launcher"], case["flags"]) == (None, True)


def test_all_our_hooks_are_in_the_host_table(seen):
    from sglang_patches.host.symbols import HOST_SYMBOLS

    hooks = seen["nobody else"]["hooks"]
    assert len(hooks) >= 15 and set(hooks) <= {symbol.path for symbol in HOST_SYMBOLS}


def test_the_process_that_answers_requests_does_not_load_the_metrics_library_too_early():
    """SGLang first says where metrics of several processes are kept. A library loaded before that loses those of its process."""
    code = "import sys; import sglang_patches.algorithm; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
