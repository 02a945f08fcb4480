"""A target that is slower than it is: emulated, by a sleep inside its forwards. What is measured with it must say so.

For measuring on a machine whose processor is too slow to show what drafting beside the target gains. The sleep releases the
core, as a forward on an accelerator would. It stands inside the forward, for plain decoding too: SGLang's own `/slow_down` sleeps
before the worker drafts, and so makes synchronous drafting look hidden.
"""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = Path(__file__).with_name("plugin")
VARIABLE = "SPECSTORE_EMULATED_LATENCY_MS"
FILE_VARIABLE = "SPECSTORE_EMULATED_LATENCY_FILE"


def emulated_latency(milliseconds: float) -> dict[str, str]:
    """Environment of a server on a CPU whose target takes at least so long for each decode or verify forward."""
    return {VARIABLE: str(milliseconds), **_with_plugin()}


class AdjustableLatency:
    """The same for any number of servers, changed while they run: each forward reads it anew, from a file. 0 emulates nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0.0)

    def set(self, milliseconds: float) -> None:
        """From each server's next forward on."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{milliseconds}")
        new.replace(self._file)

    def environment(self) -> dict[str, str]:
        """Of each server."""
        return {FILE_VARIABLE: str(self._file), **_with_plugin()}


def _with_plugin() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH", ""))))}
