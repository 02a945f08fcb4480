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


def emulated_latency(milliseconds: float) -> dict[str, str]:
    """Environment of a server on a CPU whose target takes at least so long for each decode or verify forward."""
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH", ""))))
    return {VARIABLE: str(milliseconds), "PYTHONPATH": path}
