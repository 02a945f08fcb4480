"""Starts the draft process of a server."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from sglang_patches.draft_process.settings import DraftSettings
from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.process_channel import ProcessChannel

PROGRAM = (sys.executable, "-m", "sglang_patches.draft_process")


def start_draft_process(settings: DraftSettings) -> DraftChannel:
    """Waits until it is ready. Raises RuntimeError with the end of its log if it does not become ready."""
    log = Path(tempfile.mkdtemp(prefix="specstore-draft-")) / "log"  # a folder that nobody else can write to
    return ProcessChannel([*PROGRAM, *settings.flags()], environment_of(settings), log)


def environment_of(settings: DraftSettings) -> dict[str, str]:
    """What the process has that differs from this one's. On a CPU its threads are as many as the cores that it is pinned to, or half of
    this process's, unless the operator has set their number."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # one that spins slows down its target on the same processor
        # A target on a GPU has set it for its own processes, and SGLang on a CPU refuses it.
        "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
    }
    if settings.device != "cpu":
        return environment
    cores = len(settings.cores.split(",")) if settings.cores else len(os.sched_getaffinity(0)) // 2
    # On a host with a GPU: SGLang must not find it.
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores)))}
