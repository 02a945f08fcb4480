"""How a process is told to end, and that it does.

Python runs a signal's handler on the main thread, between two instructions. A main thread on its way to sleep on a lock
has looked for signals for the last time, and while it sleeps the kernel may give a signal to another thread: either way
it sleeps on, and the handler waits with it for the next signal. The interpreter also writes the signal's number to a file,
at once and on whatever thread, and who reads that file misses none.
"""

from __future__ import annotations

import os
import select
import signal
import threading


class EndSignals:
    """SIGTERM and SIGINT, from now on. Made on the main thread."""

    def __init__(self) -> None:
        self._numbers, told = os.pipe()
        os.set_blocking(told, False)  # as `set_wakeup_fd` wants it
        signal.set_wakeup_fd(told)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def wait(self) -> None:
        """Until there has been one."""
        os.read(self._numbers, 1)

    def end_within(self, seconds: float) -> None:
        """From now on the next signal ends the process at once, and so does the time, with status 1: whatever then still
        runs, a merge say, or waits is left as by kill -9."""
        threading.Thread(target=self._end, args=(seconds,), name="specstore-ending", daemon=True).start()

    def _end(self, seconds: float) -> None:
        again, _, _ = select.select([self._numbers], [], [], seconds)
        # Not by a signal's default action: a container's first process has none. No log line: that may be what waits.
        os._exit(128 + os.read(self._numbers, 1)[0] if again else 1)
