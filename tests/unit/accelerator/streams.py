"""Streams and events without a device, in place of torch's module of one (`torch.cuda`). An event happens when the test says so."""

import contextlib
import threading


class Stream:
    def __init__(self, streams, name):
        self._streams, self.name = streams, name

    def wait_stream(self, other):
        self._streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        assert event in self._streams.recorded
        self._streams.log.append(f"{self.name} waits for the event on {event.stream.name}")


class Event:
    def __init__(self, streams, blocking):
        self._streams, self._happened, self._blocking = streams, threading.Event(), blocking

    def record(self, stream):
        assert stream is self._streams.current
        self.stream = stream
        self._streams.log.append(f"event on {stream.name}")
        self._streams.recorded.append(self)

    def happen(self):
        self._happened.set()

    def synchronize(self):
        assert self._blocking  # else a thread that waits for it takes a core
        assert self in self._streams.recorded
        assert self._happened.wait(60)


class Streams:
    """log: what was asked for, in order. recorded: events."""

    def __init__(self):
        self.log, self.recorded = [], []
        self.forward = self.current = Stream(self, "forward")

    def Stream(self):  # noqa: N802 - torch's name
        return Stream(self, "side")

    def Event(self, blocking=False):  # noqa: N802 - torch's name
        return Event(self, blocking)

    def current_stream(self):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def current_device(self):
        return 3

    def set_device(self, device):
        self.log.append(f"device {device} in {threading.current_thread().name}")
