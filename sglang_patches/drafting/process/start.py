"""Starts the draft process of a server."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from sglang_patches.drafting.channel import DraftChannel
from sglang_patches.drafting.process.settings import DraftSettings
from sglang_patches.drafting.process_channel import ProcessChannel

PROGRAM = (sys.executable, "-m", "sglang_patches.drafting.process")


def start_draft_process(settings: DraftSettings) -> DraftChannel:
    """Waits until it is ready. Raises RuntimeError with the end of its log if it does not become ready."""
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",  # one that spins slows down its target on the same processor
        # A target on a GPU has set it for its own processes, and SGLang on a CPU refuses it.
        "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
    }
    if settings.device == "cpu":
        # On a host with a GPU: SGLang must not find it.
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    log = Path(tempfile.mkdtemp(prefix="specstore-draft-")) / "log"  # a folder that nobody else can write to
    return ProcessChannel([*PROGRAM, *settings.flags()], environment, log)
