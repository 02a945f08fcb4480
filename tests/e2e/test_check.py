"""`python -m sglang_patches.check --device` on this machine, as an operator runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_patches.check.__main__ import CACHES
from sglang_patches.check.parts import LAST
from sglang_patches.methods.registry import METHODS
from tests.support.tiny_head import train_tiny_head
from tests.support.tiny_model import write_spelling_model

WRONG_PLUGIN, WRONG_METHOD = Path(__file__).parent / "wrong_plugin", "DUO"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "8192")
KERNELS = [
    "host symbols",
    "kernel: walk down the tree",
    "kernel: KV slots of a tree",
    "kernel: move of accepted rows",
    "tree masks",
    "shared noise",
]
DRAFTING = ["SAGUARO", "DUO", "SSSD", *LAST]
ANSWERS = [
    f"{who}: {what}"
    for who in ("plain", *DRAFTING)
    for what in ("start", "greedy answers", "sampled answers")
]
FURTHER = [
    "SAGUARO: draft process killed",
    *(f"{who}: tokens a second" for who in ("plain", "SSSD", "SAGUARO")),
]


def environment(**variables: str) -> dict[str, str]:
    """An operator's, without what SGLang sets in a process that imports it, as this one may have."""
    set_by_imports = {"SGLANG_USE_CPU_ENGINE", *CACHES}
    return {name: of for name, of in os.environ.items() if name not in set_by_imports} | variables


def shown(table: str) -> dict[str, str]:
    """The states by the names of the rows."""
    cells = [line.split("│") for line in table.splitlines() if line.startswith("│")]
    return {name.strip(): state.strip() for _, name, state, *_ in cells}


def test_device_check_passes_here(tiny_model):
    command = [sys.executable, "-m", "sglang_patches.check", "--device", "cpu", "--model", str(tiny_model)]
    command += ["--tokens", "40", *FLAGS]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    states = shown(done.stdout)
    own = [f"{who}: {what}" for who in ("plain", "SSSD") for what in ("start", "greedy answers")]
    assert list(states) == KERNELS + own
    assert wrong_of(states) == {}


def wrong_of(states: dict[str, str]) -> dict[str, str]:
    """Which prompts share a batch differs from run to run, and with it how a tie is rounded: one of a row's answers may part."""
    allowed = re.compile(r"ok(, 1 of \d+ answers part by rounding|, batch \d.*)?")
    return {name: state for name, state in states.items() if not allowed.fullmatch(state)}


class Check:
    """`check --all`, whose engines are forked."""

    def __init__(self, model: Path, out: Path, *flags: str) -> None:
        self._command = [sys.executable, "-m", "tests.support.forked_check", "--device", "cpu", "--all"]
        self._command += ["--model", str(model), "--tokens", "24", "--out", str(out), *FLAGS, *flags]

    def run(self, stopped_at: str = "", **variables: str) -> tuple[int, dict[str, str], list[str]]:
        """Status, the table's states, and the parts that began. stopped_at: the part at whose beginning it is told to end."""
        began, said = [], []
        with subprocess.Popen(
            self._command,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            reader = threading.Thread(target=lambda: said.append(running.stdout.read()))
            reader.start()
            for line in running.stderr:
                if line.endswith(" ...\n"):
                    began.append(line.removesuffix(" ...\n"))
                    if began[-1] == stopped_at:
                        running.send_signal(signal.SIGTERM)
            reader.join()
        return running.returncode, shown(said[0]), began


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A first call, in which a method answers wrongly and which is stopped; and a second one in the same folder. Results after each."""
    model, out = write_spelling_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("out")
    check, stop = Check(model, out), f"{LAST[0]}: start"
    path = os.pathsep.join(filter(None, [str(WRONG_PLUGIN), os.environ.get("PYTHONPATH")]))
    first = check.run(stopped_at=stop, PYTHONPATH=path)
    kept = json.loads((out / "results.json").read_text())
    second = check.run()
    return first, kept, second, json.loads((out / "results.json").read_text()), out


def test_the_method_that_answers_wrongly_is_named(checked):
    (status, states, _), *_ = checked
    assert status == 1
    wrong = {name for name, state in wrong_of(states).items() if state != "not run"}
    assert wrong == {f"{WRONG_METHOD}: {kind}" for kind in ("greedy answers", "sampled answers")}, states
    assert "answers differ by more than rounding" in states[f"{WRONG_METHOD}: sampled answers"]


def test_what_has_not_run_when_it_is_stopped_is_listed(checked):
    (_, states, began), kept, *_ = checked
    assert sorted(states) == sorted([*KERNELS, *ANSWERS, *FURTHER])
    assert began[-1] == f"{LAST[0]}: start" and f"{LAST[0]}: start" not in [
        row["check"] for row in kept["rows"]
    ]
    assert {name for name, state in states.items() if state == "not run"} == states.keys() - set(began[:-1])


def test_the_second_call_does_nothing_twice_and_repeats_what_failed_last(checked):
    (_, _, first), _, (status, states, second), *_ = checked
    again = [f"{WRONG_METHOD}: greedy answers", f"{WRONG_METHOD}: sampled answers"]
    assert sorted(second) == sorted(set(states) - set(first[:-1]) | set(again))
    assert second[-2:] == again
    assert status == 0


def test_every_row_of_the_table_is_ok_in_the_end(checked):
    _, _, (_, states, _), *_ = checked
    assert sorted(states) == sorted([*KERNELS, *ANSWERS, *FURTHER])
    assert wrong_of(states) == {}
    assert set(METHODS) == set(DRAFTING)


def test_one_file_has_the_results_and_what_they_belong_to(checked):
    *_, (_, states, _), kept, _ = checked
    about = kept["about"]
    assert {"sglang", "torch", "numpy"} <= about["packages"].keys() and about["device"]
    assert about["flags"] == list(FLAGS) and about["tokens"] == 24
    rows = {row["check"]: row for row in kept["rows"]}
    assert {name: row["state"] for name, row in rows.items()} == states
    assert all(row["seconds"] >= 0 for row in rows.values())
    for name in ANSWERS:
        if name.endswith("answers"):
            assert rows[name]["data"]["answers"] == 12
            assert rows[name]["data"]["tokens_per_step"] > 1 or name.startswith("plain")
    killed = rows["SAGUARO: draft process killed"]["data"]
    assert killed["restarts"] == 1 and killed["back_seconds"] > 0 and killed["answers"] >= 12
    for who in ("plain", "SSSD", "SAGUARO"):
        speeds = rows[f"{who}: tokens a second"]["data"]
        assert list(speeds) == ["1", "8", "32"] and all(of["tokens_per_second"] > 0 for of in speeds.values())


def test_compiled_kernels_go_to_the_folder(checked):
    *_, out = checked
    assert (out / "caches" / "flashinfer").is_dir()  # FlashInfer makes it when it is imported


def test_a_head_is_checked_with_retrieval_beside_it(tmp_path):
    model, head, out = (tmp_path / name for name in ("model", "head", "out"))
    head.mkdir()
    write_spelling_model(model)
    train_tiny_head("EAGLE3", model, head)
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head)]
    chain = [
        "--speculative-num-steps",
        "3",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        "4",
    ]
    status, states, _ = Check(model, out, *flags, *chain).run()
    rows = ["start", "greedy answers", "sampled answers", "tokens a second"]
    assert list(states) == [*KERNELS, *(f"{who}: {row}" for who in ("plain", "EAGLE3") for row in rows)]
    assert (status, wrong_of(states)) == (0, {})
    found = {row["check"]: row["data"] for row in json.loads((out / "results.json").read_text())["rows"]}
    for kind in ("greedy answers", "sampled answers"):
        accepted = found[f"EAGLE3: {kind}"]["accepted"]
        assert accepted.pop("head") > 0 < sum(accepted.values())
