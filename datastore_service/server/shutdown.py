"""Waits for the signals that end the process, and ends it in bounded time.

Python runs signal handlers on the main thread, between two instructions. If the main thread is about to wait on a lock,
or if the kernel delivers the signal to another thread, the main thread keeps waiting and the handler does not run until
the next signal. But the interpreter also writes the signal's number to a file descriptor, immediately and on any thread.
Reading that descriptor misses no signal.
"""

from __future__ import annotations

import os
import select
import signal
import threading


class ShutdownSignals:
    """SIGTERM and SIGINT from the construction on, which must be on the main thread."""

    def __init__(self) -> None:
        self._numbers, wakeup = os.pipe()
        os.set_blocking(wakeup, False)  # `set_wakeup_fd` requires it
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def wait(self) -> None:
        """Waits for the first signal."""
        os.read(self._numbers, 1)

    def exit_within(self, seconds: float) -> None:
        """Ends the process at the next signal, or with status 1 when the time is over. What still runs then, a merge for
        example, is left as by kill -9."""
        threading.Thread(target=self._exit, args=(seconds,), name="specstore-ending", daemon=True).start()

    def _exit(self, seconds: float) -> None:
        again, _, _ = select.select([self._numbers], [], [], seconds)
        # Not by the signal's default action: the first process of a container has none. Nothing is logged, because the
        # process may hang in logging.
        os._exit(128 + os.read(self._numbers, 1)[0] if again else 1)
