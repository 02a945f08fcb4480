"""How the draft process is started: with a log that no other user of the machine can choose."""

import dataclasses
import os
import stat
import sys
import tempfile

import pytest

from sglang_patches.draft_process.settings import DraftSettings
from sglang_patches.step import assembly

SETTINGS = DraftSettings(
    method="SAGUARO",
    arguments={"model_path": "draft"},
    quantization="",
    tokenizer="",
    tokenizer_revision="",
    device="cpu",
    tokens=1,
    sessions=1,
    rows=1,
    lookahead=1,
    namespace="m",
    fingerprint="f",
    context_length=1,
    vocabulary=1,
    serial=False,
    cores="",
)


def test_the_log_is_in_a_folder_of_this_users_own(tmp_path, monkeypatch):
    """In the folder that all users share, another may have made a link of any name that can be guessed."""
    shared, others = tmp_path / "tmp", tmp_path / "others"
    shared.mkdir()
    others.write_text("untouched")
    guessed = shared / f"specstore-draft-{os.getpid()}.log"
    guessed.symlink_to(others)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.setattr(assembly, "PROGRAM", (sys.executable, "-c", "print('this is its end')"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ends:\nthis is its end"):
            assembly.start_draft_process(SETTINGS)
    assert others.read_text() == "untouched"
    folders = set(shared.iterdir()) - {guessed}
    assert [log.read_text() for folder in folders for log in folder.iterdir()] == ["this is its end\n"] * 2
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


@pytest.mark.parametrize(
    ("device", "cores", "given", "threads"),
    [
        ("cpu", "", None, "3"),  # beside a target on the same CPU
        ("cpu", "4,5", None, "2"),  # beside a GPU, one of two replicas
        ("cpu", "7", None, "1"),
        ("cpu", "4,5", "9", "9"),
        ("cuda:1", "", None, None),
    ],
)
def test_on_a_cpu_it_has_a_thread_for_each_of_its_cores(monkeypatch, device, cores, given, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    environment = assembly.environment_of(dataclasses.replace(SETTINGS, device=device, cores=cores))
    assert environment.get("OMP_NUM_THREADS") == threads
    assert environment.get("CUDA_VISIBLE_DEVICES") == ("" if device == "cpu" else None)
