"""How the draft process is started: with a log that no other user of the machine can choose."""

import os
import stat
import sys
import tempfile

import pytest

from sglang_patches.drafting.process import start
from sglang_patches.drafting.process.settings import DraftSettings

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
    monkeypatch.setattr(start, "PROGRAM", (sys.executable, "-c", "print('this is its end')"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ends:\nthis is its end"):
            start.start_draft_process(SETTINGS)
    assert others.read_text() == "untouched"
    folders = set(shared.iterdir()) - {guessed}
    assert [log.read_text() for folder in folders for log in folder.iterdir()] == ["this is its end\n"] * 2
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
