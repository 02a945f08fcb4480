"""The early exit on an accelerator: inside the captured graph, on a stream beside the target's other layers.

Unproven until a GPU has run it. What it relies on:

- A layer's `capture_output` is called while a graph is captured, and what it launches is replayed with the graph.
- The side stream joins the main one at the last layer, as a capture wants it. Up to there the two run side by side.
- What is copied to pinned memory is in the order of the side stream: the step's number, its choices, its number again. So who finds
  the second number there, reads the choices, and then finds the first number still there, has read the choices of this step.

Tensor-parallel ranks gather the parts of the head's logits on the main stream, a few layers further on. There the target's own
collectives are in one order on all ranks, in a captured graph too. On the side stream, or in a communicator of its own, nothing would
order the gather among them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_patches.early_exit.tap import Draws, Receiver, Tap

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_patches.early_exit.file import Adapter

logger = logging.getLogger(__name__)

POLL_SECONDS = 5e-5  # between two looks at the step's number
LATE_SECONDS = 1.0  # after which a step's choices are not waited for: its graph has no early exit


class _Step(NamedTuple):
    """A step whose choices are waited for.

    number: of the step, from 1.
    rows: number of rows that are read.
    choices: number of a row's choices that the receiver gets.
    """

    number: int
    rows: int
    choices: int
    receiver: Receiver


class GraphTap(Tap):
    """The tap of an accelerator: the early exit is part of the captured graph.

    rows: most that are read of a forward.
    choices: number of a row's choices that the graph computes.
    """

    def __init__(self, runner: ModelRunner, adapter: Adapter, layer: int, rows: int, choices: int) -> None:
        super().__init__(runner, adapter, layer)
        self._devices = torch.get_device_module(runner.device)
        self._stream = self._devices.Stream()
        device = torch.device(runner.device)
        # What the graph reads.
        self._rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(rows, device=device)
        self._seeds = torch.full((rows,), -1, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        # What it writes, in this order: `begun` and `done` are the step's number.
        self._begun = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._tokens = torch.zeros(rows, choices, dtype=torch.int32, pin_memory=True)
        self._chances = torch.zeros(rows, choices, pin_memory=True)
        self._done = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        # Tensors of the main stream that the side stream reads. Until it has joined, their memory may not be used for anything else.
        self._kept: list[torch.Tensor] = []
        self._part: torch.Tensor | None = None  # of the logits, to be gathered
        self._last, self._told_late = 0, False
        layers = runner.model.model.layers
        if self._exit.divided:
            _after(layers[_gathered_after(runner.model, layer)], self._gather)
        _after(layers[-1], self._join)
        self._steps: SimpleQueue[_Step] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specstore-early-exit", daemon=True)
        self._thread.start()

    def expect(self, draws: Draws, choices: int, receiver: Receiver) -> None:
        """Returns at once: what the graph reads is copied on the current stream."""
        self._last += 1
        rows = len(draws.rows)
        read = self._rows, self._temperatures, self._seeds, self._positions
        for there, values in zip(read, draws, strict=True):
            there[:rows].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)
        self._number.fill_(self._last)
        self._steps.put(_Step(self._last, rows, choices, receiver))

    def _captured(self, states: torch.Tensor) -> None:
        # A copy: the next layer may write over them. A forward that nobody expected may have fewer rows than the one before.
        rows = self._rows[: len(states)].clamp(max=len(states) - 1)
        kept = self._keep(states.index_select(0, rows))
        with self._beside():
            logits = self._exit.logits(kept)
            if self._exit.divided:
                self._part = logits
            else:
                self._tell(logits)

    def _gather(self) -> None:
        if self._part is None:
            return
        self._devices.current_stream().wait_stream(self._stream)
        logits = self._keep(self._exit.whole(self._part))
        self._part = None
        with self._beside():
            self._tell(logits)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor

    def _tell(self, logits: torch.Tensor) -> None:
        rows = len(logits)
        drawn = self._temperatures[:rows], self._seeds[:rows], self._positions[:rows]
        tokens, chances = self._exit.choices(logits, *drawn, self._tokens.shape[1])
        self._begun.copy_(self._number, non_blocking=True)
        self._tokens[:rows].copy_(tokens, non_blocking=True)
        self._chances[:rows].copy_(chances, non_blocking=True)
        self._done.copy_(self._number, non_blocking=True)

    def _join(self) -> None:
        if self._kept:
            self._devices.current_stream().wait_stream(self._stream)
            self._kept.clear()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the side stream, after what the main one has launched."""
        self._stream.wait_stream(self._devices.current_stream())
        with self._devices.stream(self._stream):
            yield

    def _run(self) -> None:
        try:
            while True:
                self._deliver(self._steps.get())
        except Exception:  # of the receiver
            logger.exception("specstore: the early exit is no longer read; drafts come as without one")

    def _deliver(self, step: _Step) -> None:
        """Nothing of a step that is over: what it left is another's by now."""
        begun, done, until = self._begun.numpy(), self._done.numpy(), time.monotonic() + LATE_SECONDS
        while done[0] < step.number:
            if time.monotonic() > until:
                if not self._told_late:
                    logger.warning("specstore: a step's early exit did not speak; drafts come as without one")
                    self._told_late = True
                return
            time.sleep(POLL_SECONDS)
        tokens = self._tokens[: step.rows, : step.choices].numpy().copy()
        chances = self._chances[: step.rows, : step.choices].numpy().copy()
        if begun[0] == step.number:
            step.receiver(tokens, chances)


def _gathered_after(model: torch.nn.Module, layer: int) -> int:
    """The layer after which the main stream waits for this rank's part of the logits: the side stream has them by then, if a layer and the
    head take as long as they have weights to read, and each has half of the bandwidth."""
    layers = model.model.layers
    ahead = math.ceil(2 * _weights(model.lm_head) / max(1, _weights(layers[layer])))
    return min(layer + ahead, len(layers)) - 1


def _weights(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _after(layer: torch.nn.Module, join: Callable[[], None]) -> None:
    """Joins once the layer's forward is launched."""
    stock = layer.forward

    @functools.wraps(stock)
    def forward(*arguments: Any, **named: Any) -> object:
        result = stock(*arguments, **named)
        join()
        return result

    layer.forward = forward
