"""A plugin of SGLang that records what a worker and its draft process do. Put on the path of a server under test only."""

from __future__ import annotations

import os
import sys

VARIABLE = "SPECSTORE_DRAFT_TRACE"
DRAFT_PROCESS = "sglang_patches.drafting.process.__main__"
MADE = "sglang.srt.managers.tp_worker.TpModelWorker.__init__"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"


def register() -> None:
    """Does nothing without the variable. Imports the recorders late: they import the plugin's metrics."""
    if VARIABLE not in os.environ:
        return
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == DRAFT_PROCESS:
        from benchmarks.draft_trace.draft_recorder import record_draft_side

        record_draft_side()
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(MADE, _target_made, HookType.AFTER)
    HookRegistry.register(FORWARD, _forward, HookType.AROUND)


def _target_made(made, worker, *_, **__) -> None:
    if worker.model_runner.device != "cpu":
        raise SystemExit(
            f"{VARIABLE}: a forward on {worker.model_runner.device} has not ended when it returns"
        )
    from benchmarks.draft_trace.recorder import record_worker

    record_worker()


def _forward(forward, worker, batch, *arguments, **named):
    from benchmarks.draft_trace.recorder import timed_forward

    return timed_forward(forward, worker, batch, *arguments, **named)
