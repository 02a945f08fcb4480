"""A server whose steps give each request as many rows, as they must on an accelerator: what rows by request are compared with."""

from __future__ import annotations

import os
from pathlib import Path

PLUGIN = Path(__file__).with_name("plugin")


def one_width() -> dict[str, str]:
    """Environment of the server."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH", ""))))}
