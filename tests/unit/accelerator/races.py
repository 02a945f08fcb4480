"""Finds where streams use the same memory in no order, and where memory is given back while another stream uses it.

The tensors are on the CPU and every operation runs at once. What is looked for is what a device may do: streams keep their own order, and
nothing else is ordered but by waits and events. Memory that is given back is the next one's of the stream that it was taken on, as torch's
allocator has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.accelerator.streams import Event, Stream, Streams

HOST = "host"
Clock = dict[str, int]  # of each stream, how many of its operations are known to be over


class OrderedStreams(Streams):
    """clocks: of each stream and the host."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {"forward": {}, "side": {}, HOST: {}}
        super().__init__()
        self.forward = self.current = OrderedStream(self, "forward")

    def Stream(self) -> OrderedStream:  # noqa: N802 - torch's name
        return OrderedStream(self, "side")

    def Event(self, blocking: bool = False) -> OrderedEvent:  # noqa: N802 - torch's name
        return OrderedEvent(self, blocking)

    def learn(self, who: str, clock: Clock) -> None:
        own = self.clocks[who]
        own |= {name: max(count, own.get(name, 0)) for name, count in clock.items()}


class OrderedStream(Stream):
    def wait_stream(self, other: Stream) -> None:
        super().wait_stream(other)
        self._streams.learn(self.name, self._streams.clocks[other.name])


class OrderedEvent(Event):
    def record(self, stream: Stream) -> None:
        super().record(stream)
        self._clock = dict(self._streams.clocks[stream.name])

    def synchronize(self) -> None:
        super().synchronize()
        self._streams.learn(HOST, self._clock)


class Use(NamedTuple):
    stream: str
    count: int
    operation: str


@dataclass
class Memory:
    """owner: the stream that it was taken on, "" if it was there before."""

    alive: StorageWeakRef
    owner: str
    written: Use | None = None
    read: list[Use] = field(default_factory=list)


class Races(TorchDispatchMode):
    """found: what has no order. before: is called with each operation's name and arguments."""

    def __init__(self, streams: OrderedStreams, before: Callable = lambda name, arguments: None) -> None:
        super().__init__()
        self._streams, self._before = streams, before
        self._memory: dict[int, Memory] = {}
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self._give_back()
        self._before(name, args)
        result = func(*args, **(kwargs or {}))
        stream = self._streams.current.name
        own = self._streams.clocks[stream]
        own[stream] = own.get(stream, 0) + 1
        use = Use(stream, own[stream], name)
        for tensor, writes in _accesses(func, args, kwargs or {}):
            self._note(tensor, use, writes)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in self._memory:
                self._note(tensor, use, True, owner=stream)
        return result

    def host_reads(self, tensor: torch.Tensor) -> None:
        self._note(tensor, Use(HOST, 0, "a look of the host"), False)

    def _note(self, tensor: torch.Tensor, use: Use, writes: bool, owner: str = "") -> None:
        new = Memory(StorageWeakRef(tensor.untyped_storage()), owner)
        memory = self._memory.setdefault(_key(tensor), new)
        earlier = [memory.written, *(memory.read if writes else ())]
        known = self._streams.clocks[use.stream]
        for other in filter(None, earlier):
            if other.stream != use.stream and known.get(other.stream, 0) < other.count:
                self.found.add(f"{use.operation} on {use.stream} beside {other.operation} on {other.stream}")
        if writes:
            memory.written, memory.read = use, []
        else:
            memory.read.append(use)

    def _give_back(self) -> None:
        for key, memory in list(self._memory.items()):
            if not memory.alive.expired():
                continue
            del self._memory[key]
            # What the host has waited for is over before anything that is launched from now on.
            known = (self._streams.clocks.get(memory.owner, {}), self._streams.clocks[HOST])
            for use in filter(None, [memory.written, *memory.read]):
                over = use.stream == memory.owner or any(of.get(use.stream, 0) >= use.count for of in known)
                if memory.owner and not over:
                    self.found.add(f"given back on {memory.owner} before {use.operation} on {use.stream}")


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _accesses(func, args, kwargs) -> list[tuple[torch.Tensor, bool]]:
    """The operation's tensors, and whether it writes to them. None of one that only makes a view."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue
        found += [(leaf, alias is not None) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
