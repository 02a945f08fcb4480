"""Processes with a draft process that end in several ways: `python -m tests.support.draft_parents WAY PROGRAM LOG`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

from sglang_patches.drafting import channel as channels
from sglang_patches.drafting.channel import ProcessChannel
from tests.waiting import eventually


def start(program: str, log: Path) -> ProcessChannel:
    channels.STOP_SECONDS = 60.0  # its last words are waited for
    command = [sys.executable, "-m", "tests.support.draft_programs", program]
    return ProcessChannel(command, {}, log)


def run(way: str, program: str, log: Path) -> None:
    channel = start(program, log)
    (log.parent / "ready").touch()
    if way == "wait":
        time.sleep(3600)
    eventually((log.parent / "go").exists, "nobody lets it end")
    if way == "raise":
        raise ValueError("a fault")
    if way == "exit at once":
        os._exit(1)
    assert way == "return" and channel.collect(0.0) == []


if __name__ == "__main__":
    way, program, log = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if way == "spawned":  # as SGLang's scheduler process
        process = multiprocessing.get_context("spawn").Process(target=run, args=("return", program, log))
        process.start()
        process.join()
    else:
        run(way, program, log)
