"""A plugin of SGLang that emulates a slower target. Put on the path of a server under test only; see the package around it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

VARIABLE = "SPECSTORE_EMULATED_LATENCY_MS"
TARGET = "sglang.srt.managers.tp_worker.TpModelWorker.__init__"


def register() -> None:
    """Does nothing without the variable. Ends the process for a value that is no positive number: SGLang would only log an
    error, and go on at full speed."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return
    try:
        seconds = float(value) / 1e3
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise SystemExit(f"{VARIABLE}={value!r}: give a number of milliseconds above 0")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, lambda made, worker, *_, **__: slow_down(worker, seconds), HookType.AFTER)


def slow_down(worker, seconds: float) -> None:
    """Slows a worker's model runner, unless it is a draft's. A draft process has a model runner without such a worker."""
    if worker.is_draft_worker:
        return
    runner = worker.model_runner
    if runner.device != "cpu":
        raise SystemExit(f"{VARIABLE}: a forward on {runner.device} has not ended when it returns")
    logger.warning("EMULATED latency: each decode or verify forward takes at least %g ms", seconds * 1e3)
    runner.forward = slowed(runner.forward, seconds)


def slowed(forward: Callable, seconds: float) -> Callable:
    """`ModelRunner.forward` that takes at least so long from its beginning for a decode or verify batch."""

    def slow(forward_batch, *arguments, **named):
        began = time.monotonic()
        result = forward(forward_batch, *arguments, **named)
        mode = forward_batch.forward_mode
        if mode.is_decode() or mode.is_target_verify():
            time.sleep(max(0.0, began + seconds - time.monotonic()))
        return result

    return slow
