"""Brings the outcome of a verification to the draft side as soon as an accelerator has it.

The worker itself learns it when the request's next step begins. Under overlap scheduling that is later: the scheduler processes the
results of the step before, and other requests' prompts may be prefilled first.

After the verification is launched its tokens are copied to pinned memory on a stream of their own, behind an event. A thread waits
for the event and passes the tokens on. `drafting/speculation.py` says what may run beside the worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.utils import is_pin_memory_available

logger = logging.getLogger(__name__)

Receiver = Callable[[list[np.ndarray]], None]  # takes each request's tokens, int32


class _Parcel(NamedTuple):
    """A step's tokens on their way to the host.

    tokens, counts: on the host, once `arrived` has happened. Until then their sources are held: their memory may not be used for anything
        else.
    """

    arrived: torch.Event
    sources: tuple[torch.Tensor, torch.Tensor]
    tokens: torch.Tensor
    counts: torch.Tensor
    receiver: Receiver


def make_courier(device: str) -> Courier | None:
    """None for a CPU, whose worker has the tokens at once, and where no memory can be pinned."""
    if device == "cpu":
        return None
    if not is_pin_memory_available(device):
        logger.info("specstore: without pinned memory the draft side learns outcomes a step later")
        return None
    return Courier(torch.get_device_module(device))


class Courier:
    """Carries the tokens of verifications to the host, in a thread of its own. After an error it carries nothing more: the worker's own
    outcomes reach the draft side one step later.

    devices: the device's module of torch, `torch.get_device_module`.
    """

    def __init__(self, devices: ModuleType) -> None:
        self._devices = devices
        self._stream = devices.Stream()
        self._device = devices.current_device()
        self._parcels: SimpleQueue[_Parcel] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="specstore-courier", daemon=True)
        self._thread.start()

    def send(self, tokens: torch.Tensor, counts: torch.Tensor, receiver: Receiver) -> None:
        """Returns at once. tokens: int32 [batch, width] on the device, each row valid up to its entry of `counts` (int32 [batch]).
        They may still be computed, on the current stream. receiver: is called in the courier's thread."""
        if not self._thread.is_alive():
            return
        self._stream.wait_stream(self._devices.current_stream())
        with self._devices.stream(self._stream):
            arrived = self._devices.Event(blocking=True)  # the thread sleeps until it has happened
            sources = tokens, counts
            parcel = _Parcel(arrived, sources, _copied(tokens), _copied(counts), receiver)
            arrived.record(self._stream)
        self._parcels.put(parcel)

    def _run(self) -> None:
        self._devices.set_device(self._device)
        try:
            while True:
                self._deliver(self._parcels.get())
        except Exception:  # of the device, or of the receiver
            logger.exception("specstore: the courier has ended; the draft side learns outcomes a step later")

    @staticmethod
    def _deliver(parcel: _Parcel) -> None:
        parcel.arrived.synchronize()
        rows = parcel.tokens.numpy().copy()
        parcel.receiver([row[:count] for row, count in zip(rows, parcel.counts.tolist(), strict=True)])


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, once the current stream is there. A copy into other memory than pinned would wait for the forward."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
