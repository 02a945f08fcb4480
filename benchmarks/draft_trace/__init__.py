"""What a server's worker and its draft process did, and when: recorded while they serve, replayed afterwards.

A recorder is loaded into both processes as a plugin of SGLang. Each process writes one file of events (`events.py`), timed by the
machine's monotonic clock, which all processes share. `recorder.py` and `draft_recorder.py` wrap the product's parts, `replay.py`
feeds what was recorded through the same parts again, and `overlap.py` says how much of the draft's time lay beside the target's.

For servers on a CPU, where a forward has ended when it returns.
"""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = Path(__file__).with_name("plugin")
PROJECT = Path(__file__).resolve().parents[2]  # the recorder's own code
VARIABLE = "SPECSTORE_DRAFT_TRACE"  # names the folder of the files
SERIAL_VARIABLE = "SPECSTORE_DRAFT_TRACE_SERIAL"


def tracing(folder: Path, serial: bool = False) -> dict[str, str]:
    """Environment of a server that writes `worker-PID.jsonl` and `draft-PID.jsonl` into the folder, which exists.

    serial: the draft process hears of a verification only once its outcome is known, so that it cannot work beside it. With
    `--specstore-fallback draft` each step then waits for its draft, as in-process drafting does.
    """
    path = os.pathsep.join(filter(None, (str(PLUGIN), str(PROJECT), os.environ.get("PYTHONPATH", ""))))
    variables = {VARIABLE: str(folder), "PYTHONPATH": path}
    return variables | ({SERIAL_VARIABLE: "1"} if serial else {})
