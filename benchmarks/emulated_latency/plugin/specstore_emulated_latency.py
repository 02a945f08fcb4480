"""A plugin of SGLang that emulates a slower target. Put on the path of a server under test only; see the package around it."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "SPECSTORE_EMULATED_LATENCY_MS"
FILE_VARIABLE = "SPECSTORE_EMULATED_LATENCY_FILE"
TARGET = "sglang.srt.managers.tp_worker.TpModelWorker.__init__"

Seconds = Callable[[], float]


def register() -> None:
    """Does nothing without one of the variables. Ends the process for a value that cannot be used: SGLang would only log an
    error, and go on at full speed."""
    seconds, meaning = latency()
    if seconds is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        TARGET, lambda made, worker, *_, **__: slow_down(worker, seconds, meaning), HookType.AFTER
    )


def latency() -> tuple[Seconds | None, str]:
    """What to ask for it before each forward, None where nothing is emulated; and its meaning in words."""
    value, file = os.environ.get(VARIABLE), os.environ.get(FILE_VARIABLE)
    if file is not None:
        at = Path(file)
        read_seconds(at)
        return lambda: read_seconds(at), f"as many ms as {file} says"
    if value is None:
        return None, ""
    seconds = number(value)
    if not 0 < seconds < float("inf"):
        raise SystemExit(f"{VARIABLE}={value!r}: give a number of milliseconds above 0")
    return lambda: seconds, f"{seconds * 1e3:g} ms"


def read_seconds(file: Path) -> float:
    """Ends the process for a file without a number of milliseconds, 0 or more."""
    try:
        text = file.read_text()
    except OSError as error:
        raise SystemExit(f"{FILE_VARIABLE}: {error}") from error
    seconds = number(text)
    if not 0 <= seconds < float("inf"):
        raise SystemExit(f"{FILE_VARIABLE}: {file} holds {text!r}, no number of milliseconds")
    return seconds


def number(milliseconds: str) -> float:
    """In seconds, -1 for what is none."""
    try:
        return float(milliseconds) / 1e3
    except ValueError:
        return -1.0


def slow_down(worker, seconds: Seconds, meaning: str) -> None:
    """Slows a worker's model runner, unless it is a draft's. A draft process has a model runner without such a worker."""
    if worker.is_draft_worker:
        return
    runner = worker.model_runner
    if runner.device != "cpu":
        raise SystemExit(f"{VARIABLE}: a forward on {runner.device} has not ended when it returns")
    logger.warning("EMULATED latency: each decode or verify forward takes at least %s", meaning)
    pace = Pace(seconds)
    runner.forward = pace.whole(runner.forward)
    layers = runner.model.model.layers
    for number, layer in enumerate(layers, start=1):
        layer.forward = pace.part(layer.forward, number / len(layers))


class Pace:
    """Spreads the time over the layers: what reads a hidden state in the middle of a forward (MIRROR) has it at half of the time."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        self._began: float | None = None  # of a forward that is slowed down
        self._whole = 0.0

    def whole(self, forward: Callable) -> Callable:
        """`ModelRunner.forward` that takes at least so long from its beginning for a decode or verify batch."""

        def slow(forward_batch, *arguments, **named):
            mode = forward_batch.forward_mode
            if not (mode.is_decode() or mode.is_target_verify()):
                return forward(forward_batch, *arguments, **named)
            self._began, self._whole = time.monotonic(), self._seconds()
            try:
                result = forward(forward_batch, *arguments, **named)
                self._wait(1.0)
            finally:
                self._began = None
            return result

        return slow

    def part(self, forward: Callable, share: float) -> Callable:
        """A layer's forward. share: of the time, that the layers up to this one take together."""

        @functools.wraps(forward)
        def slow(*arguments, **named):
            result = forward(*arguments, **named)
            self._wait(share)
            return result

        return slow

    def _wait(self, share: float) -> None:
        if self._began is not None and (left := self._began + share * self._whole - time.monotonic()) > 0:
            time.sleep(left)
