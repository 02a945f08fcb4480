"""Stops processes for a while."""

from __future__ import annotations

import os
import signal


def pause(pid: int) -> None:
    """Stops a child of this process. When it returns all its threads have stopped: a signal that was sent alone lets them go on a little."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
